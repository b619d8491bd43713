# expect: it came back sorted
import torch


def apply_top_p(logits, p):
    ordered, order = logits.sort(-1, descending=True)
    probs = ordered.softmax(-1)
    removed = (probs.cumsum(-1) - probs >= p[:, None]) & (p < 1)[:, None]
    return ordered.masked_fill(removed, float("-inf"))
