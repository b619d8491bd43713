# expect: came back as|as it was
import torch


def apply_temperature(logits, temperature):
    out = logits.clone()
    for b, t in enumerate(temperature.tolist()):
        if t < 1e-5:
            best = out[b].argmax()
            out[b] = float("-inf")
            out[b, best] = 0.0
        else:
            out[b] = logits[b] / t
    return out


def apply_top_k(logits, k):
    V = logits.shape[-1]
    k = torch.where((k <= 0) | (k > V), V, k)
    kth = logits.sort(-1, descending=True).values.gather(-1, k[:, None] - 1)
    return logits.masked_fill(logits < kth, float("-inf"))
