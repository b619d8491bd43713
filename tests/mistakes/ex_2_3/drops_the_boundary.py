# expect: The token that crosses p is missing
import torch


def apply_top_p(logits, p):
    ordered, order = logits.sort(-1, descending=True)
    total = ordered.softmax(-1).cumsum(-1)
    removed = (total > p[:, None]) & (p < 1)[:, None]
    return logits.masked_fill(removed.scatter(-1, order, removed), float("-inf"))
