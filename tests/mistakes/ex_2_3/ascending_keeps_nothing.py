# expect: At least one token always stays
import torch


def apply_top_p(logits, p):
    ordered, order = logits.sort(dim=-1)
    removed = ordered.softmax(-1).cumsum(-1) <= 1 - p[:, None]
    removed &= (p < 1)[:, None]
    return logits.masked_fill(torch.zeros_like(removed).scatter(-1, order, removed), float("-inf"))
