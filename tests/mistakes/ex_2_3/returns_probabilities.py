# expect: Those are the probabilities
import torch


def apply_top_p(logits, p):
    ordered, order = logits.sort(-1, descending=True)
    probs = ordered.softmax(-1)
    removed = (probs.cumsum(-1) - probs >= p[:, None]) & (p < 1)[:, None]
    kept = logits.masked_fill(removed.scatter(-1, order, removed), float("-inf"))
    return torch.where(kept.isneginf(), kept, logits.softmax(-1))
