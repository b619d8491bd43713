"""int4 weights for CPUs: `quantization="int4"`. May not know where in the model a matrix stands.

A matrix row is cut into groups of 32 numbers. A group keeps two numbers of its own, and 4 bits for each of its members:

    w = low + q * step       q in 0..15        5 bits a weight with the group's two, where bfloat16 has 16

Decoding one sequence reads every weight once a token, so a third of the bytes is a third of the time. The products are torch's
(`aten._weight_int4pack_mm_for_cpu`): it unpacks while it multiplies, which pays for few rows of x. For more (`FEW_ROWS`) the
same numbers are multiplied as bfloat16, if there was memory to keep them so, too.

The grid is llama.cpp's Q4_1. In a checkpoint made from a Q4_1 file (smollm2-135m is) a group's smallest and largest number are
`low` and `low + 15 * step`: the same q come out again, so nothing is quantized twice. The embedding and lm_head stay as they
are: such files keep more bits of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from minivllm.models.decoder import Decoder
from minivllm.models.linear import Linear

GROUP = 32
ROWS = 16  # the kernel takes the matrix's rows by so many
# Of x. SmolLM2-135M's layers, compiled, 2 cores with AMX, medians: at 1, 2, 3, 4, 5, 6, 8 rows 10, 12, 13, 16, 27, 21, 27 ms
# with this kernel, 20, 20, 19, 22, 24, 20, 21 ms as bfloat16.
FEW_ROWS = 4
DTYPES = (torch.bfloat16, torch.float32)
EITHER, PACKED, UNPACKED = "either", "packed", "unpacked"

_operators = torch.library.Library("minivllm", "FRAGMENT")
_operators.define("int4_linear(Tensor x, Tensor packed, Tensor scales_and_zeros, Tensor? weight) -> Tensor")


def _int4_linear(
    x: torch.Tensor, packed: torch.Tensor, scales_and_zeros: torch.Tensor, weight: torch.Tensor | None
) -> torch.Tensor:
    if weight is not None and len(x) > FEW_ROWS:
        return F.linear(x, weight)
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), packed, GROUP, scales_and_zeros)


_operators.impl("int4_linear", _int4_linear, "CPU")
torch.library.register_fake(
    "minivllm::int4_linear", lambda x, packed, *rest: x.new_empty(x.shape[0], packed.shape[0]), lib=_operators
)


class Int4Linear(nn.Module):
    """A `Linear` that is filled, with its weight in int4. `keep_unpacked`: also as the numbers these stand for."""

    packed: torch.Tensor
    scales_and_zeros: torch.Tensor

    def __init__(self, linear: Linear, keep_unpacked: bool) -> None:
        super().__init__()
        q, scales, zeros = quantize(linear.weight.detach())
        self.register_buffer("packed", torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1))
        self.register_buffer("scales_and_zeros", torch.stack([scales.t(), zeros.t()], dim=-1).contiguous())
        self.weight = dequantize(q, scales, zeros) if keep_unpacked else None
        self.bias = linear.bias
        self.form = EITHER

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        if self.form == UNPACKED:
            assert self.weight is not None, "keep_unpacked"
            return F.linear(x, self.weight, self.bias)
        y: torch.Tensor
        if self.form == PACKED:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, GROUP, self.scales_and_zeros)
        else:
            y = torch.ops.minivllm.int4_linear(x, self.packed, self.scales_and_zeros, self.weight)
        return y if self.bias is None else y + self.bias


def set_form(decoder: Decoder, form: str) -> bool:
    """Let all `Int4Linear`s compute with EITHER form of their weights, by the number of rows, or with one of them always, as a
    compiler needs it. Returns whether there are any."""
    linears = [module for module in decoder.modules() if isinstance(module, Int4Linear)]
    for linear in linears:
        linear.form = form
    return bool(linears)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """weight [N, K] -> q [N, K] int32, and scales and zeros [N, K / 32] in weight's dtype: w = (q - 8) * scale + zero, which is
    the kernel's form. ValueError if N is no multiple of 16, or K none of 32."""
    N, K = weight.shape
    if N % ROWS or K % GROUP:
        raise ValueError(
            f"quantization='int4' needs matrices of a multiple of {ROWS} rows and {GROUP} columns; this model has one of"
            f" {N} x {K}. Leave quantization out."
        )
    groups = weight.float().view(N, K // GROUP, GROUP)
    low, high = groups.aminmax(dim=-1)
    step = (high - low) / 15
    q = ((groups - low[..., None]) / step.clamp(min=1e-30)[..., None]).round_().clamp_(0, 15)
    return q.to(torch.int32).view(N, K), step.to(weight.dtype), (low + 8 * step).to(weight.dtype)


def dequantize(q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """The matrix [N, K] these stand for, in the dtype of scales."""
    N, K = q.shape
    groups = (q.view(N, K // GROUP, GROUP) - 8) * scales.float()[..., None] + zeros.float()[..., None]
    return groups.to(scales.dtype).view(N, K)


@torch.no_grad()
def quantize_decoder(decoder: Decoder, keep_unpacked: bool) -> None:
    """Put `Int4Linear`s in place of all `Linear`s of the layers, one at a time: memory never holds both forms of the whole.
    ValueError for a dtype or size that the kernel does not serve; the decoder is of no use then."""
    if decoder.embed_tokens.device.type != "cpu" or decoder.embed_tokens.dtype not in DTYPES:
        raise ValueError(
            f"quantization='int4' serves bfloat16 and float32 on CPUs, not {decoder.embed_tokens.dtype} on"
            f" {decoder.embed_tokens.device.type}. Leave quantization out, or set dtype='bfloat16'."
        )
    for layer in decoder.layers:
        for name, child in list(layer.named_children()):
            if isinstance(child, Linear):
                setattr(layer, name, Int4Linear(child, keep_unpacked))
