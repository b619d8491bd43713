# expect: passed
import math

import torch


def causal_attention(q, k, v, *, scale=None, sliding_window=None):
    T, H, D = q.shape
    S, Hkv, _ = k.shape
    out = torch.zeros_like(q)
    for i in range(T):
        p = S - T + i
        first = 0 if sliding_window is None else max(0, p - sliding_window + 1)
        for h in range(H):
            g = h // (H // Hkv)
            scores = (k[first : p + 1, g].float() @ q[i, h].float()) * (scale or 1 / math.sqrt(D))
            out[i, h] = torch.softmax(scores, 0) @ v[first : p + 1, g].float()
    return out
