# expect: One loop takes both
import torch


def online_softmax(scores, values):
    best = max(s.max() for s in scores)
    total, summed = 0.0, 0.0
    for s, v in zip(scores, values):
        w = torch.exp(s - best)
        total, summed = total + w.sum(), summed + w @ v
    return summed / total
