# expect: changed its input logits in place
import torch


def apply_top_p(logits, p):
    ordered, order = logits.sort(-1, descending=True)
    probs = ordered.softmax(-1)
    removed = (probs.cumsum(-1) - probs >= p[:, None]) & (p < 1)[:, None]
    logits[removed.scatter(-1, order, removed)] = float("-inf")
    return logits
