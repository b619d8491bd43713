# expect: That is log_softmax
import torch


def apply_top_p(logits, p):
    ordered, order = logits.sort(dim=-1, descending=True)
    probs = ordered.softmax(-1)
    removed = probs.cumsum(-1) - probs >= p[:, None]
    removed &= (p < 1)[:, None]
    return logits.log_softmax(-1).masked_fill(torch.zeros_like(removed).scatter(-1, order, removed), float("-inf"))
