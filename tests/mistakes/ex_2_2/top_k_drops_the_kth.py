# expect: Nothing is left of this row
import torch


def apply_temperature(logits, temperature):
    safe = torch.where(temperature < 1e-5, torch.ones_like(temperature), temperature)
    return logits / safe[:, None]


def apply_top_k(logits, k):
    V = logits.shape[-1]
    on = (k > 0) & (k < V)
    kth = logits.sort(-1, descending=True).values.gather(-1, torch.where(on, k, 1)[:, None] - 1)
    return logits.masked_fill((logits <= kth) & on[:, None], float("-inf"))
