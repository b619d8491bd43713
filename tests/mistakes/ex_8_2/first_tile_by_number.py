# expect: Tiles come one after another, as in a kernel: for s, v in zip(scores, values).
import torch


def online_softmax(scores, values):
    out, total, best = torch.zeros(values[0].shape[1]), 0.0, float(scores[0].max())
    for s, v in zip(scores, values):
        weights = torch.exp(s - best)
        total, out = total + weights.sum(), out + weights @ v
    return out / total
