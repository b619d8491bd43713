# expect: verify_ratio is left out
def expected_tokens(acceptance, k):
    return sum(acceptance**i for i in range(k + 1))


def expected_speedup(acceptance, k, cost_ratio, verify_ratio=1.0):
    return expected_tokens(acceptance, k) / (k * cost_ratio + 1)
