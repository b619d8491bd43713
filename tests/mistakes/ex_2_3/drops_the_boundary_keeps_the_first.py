# expect: The token that crosses p is missing
import torch


def apply_top_p(logits, p):
    ordered, order = logits.sort(-1, descending=True)
    removed = (ordered.softmax(-1).cumsum(-1) > p[:, None]) & (p < 1)[:, None]
    removed[:, 0] = False
    return logits.masked_fill(removed.scatter(-1, order, removed), float("-inf"))
