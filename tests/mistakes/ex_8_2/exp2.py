# expect: That is with powers of 2. Softmax takes powers of e: torch.exp.
import torch


def online_softmax(scores, values):
    best, total, out = -float("inf"), torch.tensor(0.0), torch.tensor(0.0)
    for s, v in zip(scores, values):
        new = max(best, float(s.max()))
        base = 0.0 if new == -float("inf") else new
        weights, shrink = torch.exp2(s - base), 2.0 ** (best - base)
        total, out, best = total * shrink + weights.sum(), out * shrink + weights @ v, new
    return out / total if total else out
