"""Rotary position embedding (RoFormer, Su et al. 2021, section 3.4). Lab 01 builds `apply_rope`; the decoder splits the same
arithmetic in two: the angles once a step (`rotary_table`), the turning in every layer (`rotate`). May not know layers or
caches.

A head of D dimensions is D/2 planes; the token at position p is turned in plane i by the angle p * theta ** (-2i / D). The dot
product of a turned query and a turned key depends on the distance of their positions alone.
"""

from __future__ import annotations

import math

import torch

from minivllm.models.registry import RopeConfig


def apply_rope(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Turn each head of `x` by its token's position.

    x [T, num_heads, D], positions [T] -> [T, num_heads, D] in x's dtype. Plane i is dimensions i and i + D/2.
    """
    D = x.shape[-1]
    planes = torch.arange(0, D, 2, dtype=torch.float32, device=x.device)
    frequencies = 1.0 / theta ** (planes / D)  # [D/2], radians per position
    angles = positions[:, None].float() * frequencies  # [T, D/2]
    cos = angles.cos()[:, None, :].to(x.dtype)  # [T, 1, D/2]: the same for every head
    sin = angles.sin()[:, None, :].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each plane, [head_dim / 2] float32, stretched for long contexts as the config says."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.rope_type == "default":
        return frequencies
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    # llama3: a plane that turns often within the original context is kept, one that turns less than about once is slowed by the
    # whole factor, and those between are blended.
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def rotary_table(positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin [T, 1, D] of a step's positions [T], for `rotate`. Angles are float32: bfloat16 cannot count past 256.

    Computed once a step for all layers, which costs less than it would to keep a table of every position of a long context.
    """
    angles = positions[:, None].float() * frequencies  # [T, D/2]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat([cos, cos], dim=-1)[:, None, :], torch.cat([-sin, sin], dim=-1)[:, None, :]


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """`apply_rope` of x [T, heads, D] with the table given (`rotary_table`), in fewer kernels: rolling by D/2 swaps the two
    halves, and the sign is in the table."""
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * signed_sin
