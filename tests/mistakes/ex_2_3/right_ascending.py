# expect: passed
import torch


def apply_top_p(logits, p):
    ordered, order = logits.sort(dim=-1, descending=False)
    probs = ordered.double().softmax(-1).cumsum(-1)
    removed = probs <= 1 - p.double()[:, None]
    removed[:, -1] = False
    removed &= (p < 1)[:, None]
    return logits.masked_fill(removed.scatter(-1, order, removed), float("-inf"))
