# expect: passed
import torch


def apply_temperature(logits, temperature):
    safe = torch.where(temperature < 1e-5, torch.ones_like(temperature), temperature)
    return logits / safe[:, None]


def apply_top_k(logits, k):
    out = logits.clone()
    for b in range(len(out)):
        n = int(k[b])
        if 0 < n < out.shape[1]:
            keep = logits[b].topk(n).indices
            row = torch.full_like(out[b], float("-inf"))
            row[keep] = logits[b][keep]
            out[b] = row
    return out
