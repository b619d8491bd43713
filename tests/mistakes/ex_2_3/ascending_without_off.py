# expect: p >= 1 switches the filter off
import torch


def apply_top_p(logits, p):
    ordered, order = logits.sort(dim=-1)
    removed = ordered.softmax(-1).cumsum(-1) <= 1 - p[:, None]
    removed[:, -1] = False
    return logits.masked_fill(torch.zeros_like(removed).scatter(-1, order, removed), float("-inf"))
