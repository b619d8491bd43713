# expect: if all before it are right
def expected_tokens(acceptance, k):
    return 1 + k * acceptance


def expected_speedup(acceptance, k, cost_ratio, verify_ratio=1.0):
    return expected_tokens(acceptance, k) / (k * cost_ratio + verify_ratio)
