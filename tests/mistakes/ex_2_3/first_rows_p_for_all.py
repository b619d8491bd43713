# expect: another row's setting
import torch


def apply_top_p(logits, p):
    ordered, order = logits.sort(-1, descending=True)
    probs = ordered.softmax(-1)
    removed = (probs.cumsum(-1) - probs >= p[0]) & (p[0] < 1)
    return logits.masked_fill(removed.scatter(-1, order, removed), float("-inf"))
