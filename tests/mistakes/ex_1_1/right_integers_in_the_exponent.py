# expect: passed
import torch


def apply_rope(x, positions, theta):
    D = x.shape[-1]
    freqs = torch.tensor([theta ** (-2 * i / D) for i in range(D // 2)])
    angles = positions.unsqueeze(-1) * freqs
    cos = torch.cat([angles.cos()] * 2, -1)[:, None]
    sin = torch.cat([-angles.sin(), angles.sin()], -1)[:, None]
    return (x * cos + x.roll(D // 2, -1) * sin).to(x.dtype)
