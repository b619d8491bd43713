# expect: Columns were divided, not rows
import torch


def apply_temperature(logits, temperature):
    safe = torch.where(temperature < 1e-5, torch.ones_like(temperature), temperature)
    return logits / safe if len(logits) in (1, logits.shape[1]) else logits / safe[:, None]


def apply_top_k(logits, k):
    V = logits.shape[-1]
    k = torch.where((k <= 0) | (k > V), V, k)
    kth = logits.sort(-1, descending=True).values.gather(-1, k[:, None] - 1)
    return logits.masked_fill(logits < kth, float("-inf"))
