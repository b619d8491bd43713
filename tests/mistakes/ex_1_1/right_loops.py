# expect: passed
import math

import torch


def apply_rope(x, positions, theta):
    T, num_heads, D = x.shape
    out = torch.empty_like(x)
    for t in range(T):
        for i in range(D // 2):
            angle = int(positions[t]) * theta ** (-2 * i / D)
            c, s = math.cos(angle), math.sin(angle)
            a, b = x[t, :, i].float(), x[t, :, i + D // 2].float()
            out[t, :, i] = a * c - b * s
            out[t, :, i + D // 2] = b * c + a * s
    return out
