# expect: a mask in sorted order not brought back (scatter)
import torch


def apply_top_p(logits, p):
    ordered, order = logits.sort(-1, descending=True)
    probs = ordered.softmax(-1)
    removed = (probs.cumsum(-1) - probs >= p[:, None]) & (p < 1)[:, None]
    return logits.masked_fill(removed, float("-inf"))
