# expect: passed
import torch


def apply_rope(x, positions, theta):
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    turn = torch.polar(torch.ones(len(positions), half), positions.float()[:, None] * frequencies)
    z = torch.complex(x[..., :half].float(), x[..., half:].float()) * turn[:, None, :]
    return torch.cat([z.real, z.imag], dim=-1).to(x.dtype)
