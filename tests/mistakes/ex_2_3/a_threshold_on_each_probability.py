# expect: should stay
import torch


def apply_top_p(logits, p):
    keep = (logits.softmax(-1) >= 1 - p[:, None]) | (p >= 1)[:, None]
    return logits.masked_fill(~keep, float("-inf"))
