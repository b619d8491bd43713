# expect: best is the largest score so far
import torch


def online_softmax(scores, values):
    best, total, summed = torch.tensor(float("-inf")), torch.tensor(0.0), 0.0
    for s, v in zip(scores, values):
        new = s.max()
        base = torch.where(new == float("-inf"), 0.0, new)
        w = torch.exp(s - base)
        shrink = torch.exp(best - base)
        total = total * shrink + w.sum()
        summed = summed * shrink + w @ v
        best = new
    return summed / torch.where(total == 0, 1.0, total)
