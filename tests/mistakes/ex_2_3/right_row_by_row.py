# expect: passed
import torch


def smallest_set(probs: list[float], p: float) -> list[int]:
    chosen, total = [], 0.0
    for token in sorted(range(len(probs)), key=lambda t: probs[t], reverse=True):
        if total >= p:
            break
        chosen.append(token)
        total += probs[token]
    return chosen


def apply_top_p(logits, p):
    out = logits.clone()
    for b in range(logits.shape[0]):
        if p[b] >= 1:
            continue
        keep = smallest_set(logits[b].softmax(-1).tolist(), float(p[b]))
        mask = torch.ones(logits.shape[1], dtype=torch.bool)
        mask[keep] = False
        out[b, mask] = float("-inf")
    return out
