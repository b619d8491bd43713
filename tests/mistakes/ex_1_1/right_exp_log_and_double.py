# expect: passed
import math

import torch


def apply_rope(x, positions, theta):
    D = x.size(-1)
    i = torch.arange(D // 2, dtype=torch.float64)
    angles = torch.einsum("t,i->ti", positions.double(), torch.exp(-2 * i / D * math.log(theta))).unsqueeze(-2)
    first, second = x.double().split(D // 2, dim=-1)
    out = torch.zeros(x.shape, dtype=torch.float64)
    out[..., : D // 2] = first * torch.cos(angles) - second * torch.sin(angles)
    out[..., D // 2 :] = first * torch.sin(angles) + second * torch.cos(angles)
    return out.type_as(x)
