"""The decoder's small layers, as plain functions. Lab 01 uses them; attention has a room of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm (Zhang and Sennrich, 2019): x / sqrt(mean(x^2) + eps) * weight, over the last dimension.
    x [..., H], weight [H] -> [..., H].

    The division is in float32, and its result is rounded to x's dtype *before* the weight is applied, as transformers does it:
    in bfloat16 the order decides the last bit.
    """
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * weight


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The gated activation (SwiGLU, Shazeer 2020): [T, 2 * I], gate then up, -> silu(gate) * up [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
