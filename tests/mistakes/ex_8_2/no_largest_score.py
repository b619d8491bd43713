# expect: Subtract the largest score so far before exp
import torch


def online_softmax(scores, values):
    total, summed = 0.0, 0.0
    for s, v in zip(scores, values):
        w = torch.exp(s)
        total = total + w.sum()
        summed = summed + w @ v
    return summed / total if total > 0 else torch.zeros(v.shape[1])
