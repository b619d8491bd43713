# expect: NaN
import torch


def apply_top_p(logits, p):
    ordered, order = logits.sort(-1, descending=True)
    probs = ordered.softmax(-1)
    removed = (probs.cumsum(-1) - probs >= p[:, None]) & (p < 1)[:, None]
    keep = (~removed.scatter(-1, order, removed)).float()
    return logits * keep + torch.where(keep > 0, 0.0, float("-inf"))
