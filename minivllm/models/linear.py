"""Linear: the one matrix multiplication of the decoder, with named slices of its output. May not know what a slice is for.

Projections of the same input are packed into one matrix: one large product is faster than three small ones, most of all in
decode, where the time goes into reading the weights. The names keep the parts findable: by the weight loader today.

    qkv_proj = Linear(576, {"q_proj": 576, "k_proj": 192, "v_proj": 192})

    weight [960, 576]   | q_proj: rows 0-575 | k_proj: 576-767 | v_proj: 768-959 |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import nn


class Linear(nn.Module):
    """y [T, sum of out_slices] = x [T, in_features] @ weight.T (+ bias). Empty until it is filled through `named_slices`."""

    def __init__(
        self,
        in_features: int,
        out_slices: Mapping[str, int],
        *,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.out_slices = dict(out_slices)
        rows = sum(self.out_slices.values())
        self.weight = nn.Parameter(torch.empty(rows, in_features, dtype=dtype, device=device), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(rows, dtype=dtype, device=device), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def named_slices(self) -> Iterator[tuple[str, torch.Tensor]]:
        """("q_proj.weight", its rows), ("q_proj.bias", its entries) if there is one, and so on: views, to be written to."""
        start = 0
        for name, rows in self.out_slices.items():
            yield f"{name}.weight", self.weight[start : start + rows]
            if self.bias is not None:
                yield f"{name}.bias", self.bias[start : start + rows]
            start += rows
