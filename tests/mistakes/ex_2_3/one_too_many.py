# expect: One too many
import torch


def apply_top_p(logits, p):
    ordered, order = logits.sort(-1, descending=True)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    removed = (before >= p[:, None]) & (p < 1)[:, None]
    removed[:, 1:] = removed[:, :-1].clone()
    removed[:, 0] = False
    return logits.masked_fill(removed.scatter(-1, order, removed), float("-inf"))
