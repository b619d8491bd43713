# expect: NumPy knows no bfloat16: x.float() first
import numpy as np
import torch


def apply_rope(x, positions, theta):
    D = x.shape[-1]
    angles = positions.numpy()[:, None] / theta ** (np.arange(0, D, 2) / D)
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    first, second = np.split(x.numpy(), 2, axis=-1)
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return torch.from_numpy(turned).to(x.dtype)
