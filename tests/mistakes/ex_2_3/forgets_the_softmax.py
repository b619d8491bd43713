# expect: should stay
import torch


def apply_top_p(logits, p):
    ordered, order = logits.sort(-1, descending=True)
    removed = (ordered.cumsum(-1) - ordered >= p[:, None]) & (p < 1)[:, None]
    return logits.masked_fill(removed.scatter(-1, order, removed), float("-inf"))
