# expect: the k-th largest itself stays
import torch


def apply_temperature(logits, temperature):
    safe = torch.where(temperature < 1e-5, torch.ones_like(temperature), temperature)
    return logits / safe[:, None]


def apply_top_k(logits, k):
    V = logits.shape[-1]
    k = torch.where((k <= 0) | (k >= V), V, k)
    ordered = logits.sort(-1, descending=True).values
    after = torch.cat([ordered, torch.full_like(ordered[:, :1], float("-inf"))], -1).gather(-1, k[:, None])
    top = logits.amax(-1, keepdim=True)
    keep = (logits > after) | ((k == V)[:, None] & (logits > float("-inf")))
    first = torch.arange(V) == logits.argmax(-1, keepdim=True)
    return logits.masked_fill(~(keep | (first & ~keep.any(-1, keepdim=True))), float("-inf"))
