# expect: passed
def expected_tokens(acceptance, k):
    return 1.0 if k == 0 else 1.0 + acceptance * expected_tokens(acceptance, k - 1)


def expected_speedup(acceptance, k, cost_ratio, verify_ratio=1.0):
    return expected_tokens(acceptance, k) / (k * cost_ratio + verify_ratio)
