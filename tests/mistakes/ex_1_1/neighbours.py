# expect: i + D/2
import torch


def apply_rope(x, positions, theta):
    D = x.shape[-1]
    frequencies = 1.0 / theta ** (torch.arange(0, D, 2) / D)
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2).to(x.dtype)
