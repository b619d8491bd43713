# expect: theta = 10000
import torch


def apply_rope(x, positions, theta):
    D = x.shape[-1]
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, D, 2) / D)
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
