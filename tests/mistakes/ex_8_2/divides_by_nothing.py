# expect: Divide by 1 then: zeros come out
import torch


def online_softmax(scores, values):
    best, total, summed = torch.tensor(float("-inf")), torch.tensor(0.0), 0.0
    for s, v in zip(scores, values):
        new = torch.maximum(best, s.max())
        base = torch.where(new == float("-inf"), 0.0, new)
        w = torch.exp(s - base)
        shrink = torch.exp(best - base)
        total = total * shrink + w.sum()
        summed = summed * shrink + w @ v
        best = new
    return summed / total
