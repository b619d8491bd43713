# expect: passed
import torch


def apply_top_p(logits, p):
    ordered, order = torch.sort(logits, dim=-1, descending=True)
    probs = torch.softmax(ordered, dim=-1)
    total = probs.cumsum(-1)
    keep = torch.ones_like(total, dtype=torch.bool)
    keep[:, 1:] = total[:, :-1] < p[:, None]
    keep |= (p >= 1)[:, None]
    out = torch.full_like(logits, float("-inf"))
    return out.scatter(-1, order, ordered.masked_fill(~keep, float("-inf")))
