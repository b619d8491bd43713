# expect: The target's own token is missing
def expected_tokens(acceptance, k):
    return sum(acceptance**i for i in range(1, k + 1))


def expected_speedup(acceptance, k, cost_ratio, verify_ratio=1.0):
    return expected_tokens(acceptance, k) / (k * cost_ratio + verify_ratio)
