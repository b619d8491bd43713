# expect: -inf - -inf is NaN
import torch


def online_softmax(scores, values):
    best, total, summed = torch.tensor(float("-inf")), torch.tensor(0.0), 0.0
    for s, v in zip(scores, values):
        new = torch.maximum(best, s.max())
        base = new
        w = torch.exp(s - base)
        shrink = torch.exp(best - base)
        total = total * shrink + w.sum()
        summed = summed * shrink + w @ v
        best = new
    return summed / torch.where(total == 0, 1.0, total)
