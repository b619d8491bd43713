# expect: passed
import math

import torch


def online_softmax(scores, values):
    """With Python numbers, one score at a time."""
    best, total, summed = -math.inf, 0.0, None
    for tile, rows in zip(scores, values):
        if summed is None:
            summed = torch.zeros(rows.shape[1])
        for score, row in zip(tile, rows):
            if score == -math.inf:
                continue
            if score > best:
                factor = math.exp(best - score) if best > -math.inf else 0.0
                total, summed, best = total * factor, summed * factor, score
            weight = math.exp(score - best)
            total += weight
            summed = summed + weight * row
    return summed / total if total else summed
