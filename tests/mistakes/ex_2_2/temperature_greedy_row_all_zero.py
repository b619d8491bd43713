# expect: must stay token 2's
import torch


def apply_temperature(logits, temperature):
    scale = torch.where(temperature < 1e-5, 0.0, 1 / temperature.clamp(min=1e-5))
    return (logits.clamp(min=-1e30) * scale[:, None]).masked_fill(logits.isneginf(), float("-inf"))


def apply_top_k(logits, k):
    V = logits.shape[-1]
    k = torch.where((k <= 0) | (k > V), V, k)
    kth = logits.sort(-1, descending=True).values.gather(-1, k[:, None] - 1)
    return logits.masked_fill(logits < kth, float("-inf"))
