# expect: was divided by GREEDY_EPS
import torch


def apply_temperature(logits, temperature):
    return logits / temperature.clamp(min=1e-5)[:, None]


def apply_top_k(logits, k):
    V = logits.shape[-1]
    k = torch.where((k <= 0) | (k > V), V, k)
    kth = logits.sort(-1, descending=True).values.gather(-1, k[:, None] - 1)
    return logits.masked_fill(logits < kth, float("-inf"))
