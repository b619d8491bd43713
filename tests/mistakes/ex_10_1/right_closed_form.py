# expect: passed
def expected_tokens(acceptance, k):
    if acceptance == 1:
        return k + 1
    return (1 - acceptance ** (k + 1)) / (1 - acceptance)


def expected_speedup(acceptance, k, cost_ratio, verify_ratio=1.0):
    return expected_tokens(acceptance, k) / (k * cost_ratio + verify_ratio)
