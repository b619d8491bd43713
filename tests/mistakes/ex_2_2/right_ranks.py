# expect: passed
import torch


def apply_temperature(logits, temperature):
    safe = torch.where(temperature < 1e-5, torch.ones_like(temperature), temperature)
    return logits / safe[:, None]


def apply_top_k(logits, k):
    V = logits.size(1)
    ranks = logits.argsort(-1, descending=True).argsort(-1)
    limit = torch.where(k < 1, torch.full_like(k, V), k)
    return logits.masked_fill(ranks >= limit.unsqueeze(1), float("-inf"))
