# expect: must not be divided
import torch


def apply_temperature(logits, temperature):
    out = logits / temperature[:, None]
    return torch.where((temperature < 1e-5)[:, None], logits * 0 / temperature[:, None], out)


def apply_top_k(logits, k):
    V = logits.shape[-1]
    k = torch.where((k <= 0) | (k > V), V, k)
    kth = logits.sort(-1, descending=True).values.gather(-1, k[:, None] - 1)
    return logits.masked_fill(logits < kth, float("-inf"))
