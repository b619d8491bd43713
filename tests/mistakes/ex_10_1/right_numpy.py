# expect: passed
import numpy as np


def expected_tokens(acceptance, k):
    return (acceptance ** np.arange(k + 1)).sum()


def expected_speedup(acceptance, k, cost_ratio, verify_ratio=1.0):
    return expected_tokens(acceptance, k) / (k * cost_ratio + verify_ratio)
