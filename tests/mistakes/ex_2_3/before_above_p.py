# expect: One too many|should stay
import torch


def apply_top_p(logits, p):
    ordered, order = logits.sort(dim=-1, descending=True)
    probs = ordered.softmax(-1)
    removed = probs.cumsum(-1) - probs > p[:, None]
    removed &= (p < 1)[:, None]
    return logits.masked_fill(torch.zeros_like(removed).scatter(-1, order, removed), float("-inf"))
