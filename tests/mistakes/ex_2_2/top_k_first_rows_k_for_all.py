# expect: another row's setting
import torch


def apply_temperature(logits, temperature):
    safe = torch.where(temperature < 1e-5, torch.ones_like(temperature), temperature)
    return logits / safe[:, None]


def apply_top_k(logits, k):
    V = logits.shape[-1]
    n = int(k[0])
    if n <= 0 or n >= V:
        return logits
    kth = logits.topk(n, dim=-1).values[:, -1:]
    return logits.masked_fill(logits < kth, float("-inf"))
