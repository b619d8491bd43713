# expect: passed
import torch


def apply_top_p(logits, p):
    ordered = logits.sort(-1, descending=True).values
    probs = ordered.softmax(-1)
    count = (probs.cumsum(-1) - probs < p[:, None]).sum(-1, keepdim=True)
    boundary = ordered.gather(-1, count - 1)
    off = (p >= 1.0)[:, None]
    return torch.where((logits >= boundary) | off, logits, torch.tensor(float("-inf")))
