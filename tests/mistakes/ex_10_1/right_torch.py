# expect: passed
import torch


def expected_tokens(acceptance, k):
    return torch.tensor([float(acceptance) ** i for i in range(k + 1)], dtype=torch.float64).sum()


def expected_speedup(acceptance, k, cost_ratio, verify_ratio=1.0):
    return expected_tokens(acceptance, k) / (k * cost_ratio + verify_ratio)
