# expect: The speed-up is its inverse
def expected_tokens(acceptance, k):
    return sum(acceptance**i for i in range(k + 1))


def expected_speedup(acceptance, k, cost_ratio, verify_ratio=1.0):
    return (k * cost_ratio + verify_ratio) / expected_tokens(acceptance, k)
