"""int4 weights: what they stand for, and that the model computes with just that."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minivllm.models.int4 import FEW_ROWS, Int4Linear, dequantize, quantize, quantize_decoder
from minivllm.models.linear import Linear
from minivllm.models.weights import load_model
from tests.models.conftest import MakeModel, paged_logits, relative_error


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(dtype: torch.dtype = torch.float32) -> Linear:
    made = Linear(64, {"a": 48, "b": 32}, bias=True, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(random(80, 64))
        made.bias.copy_(random(80, seed=1))
    return made


@pytest.mark.parametrize("keep_unpacked", [False, True])
@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_with_the_numbers_the_int4_stand_for(dtype: torch.dtype, rows: int, keep_unpacked: bool) -> None:
    full, x = linear(dtype), random(rows, 64, seed=2).to(dtype)
    expected = F.linear(x.float(), dequantize(*quantize(full.weight)).float(), full.bias.float())
    ours = Int4Linear(full, keep_unpacked)(x)
    assert ours.dtype == dtype
    assert relative_error(ours, expected) < (1e-5 if dtype == torch.float32 else 2e-2)


def test_no_number_moves_by_more_than_half_a_step() -> None:
    weight = random(32, 64)
    q, scales, zeros = quantize(weight)
    moved = (dequantize(q, scales, zeros) - weight).abs().view(32, 2, 32).amax(dim=-1)
    assert (moved <= scales / 2 * 1.001).all()


def test_weights_that_were_made_of_4_bits_come_out_as_they_were() -> None:
    """As in a checkpoint converted from Q4_1: 16 numbers at equal distances, the first and the last of them in use."""
    q = torch.randint(16, (32, 64), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    q[:, ::32], q[:, 1::32] = 0, 15
    weight = dequantize(q, random(32, 2).abs() + 0.1, random(32, 2, seed=1))
    again, scales, zeros = quantize(weight)
    assert torch.equal(again, q)
    torch.testing.assert_close(dequantize(again, scales, zeros), weight)


def test_a_group_of_equal_numbers_is_kept() -> None:
    weight = torch.full((16, 32), 0.5)
    assert torch.equal(dequantize(*quantize(weight)), weight)


def test_a_model_computes_with_the_numbers_its_int4_stand_for(make_model: MakeModel) -> None:
    folder, _ = make_model("llama, biases", intermediate_size=128)
    ours, reference = (load_model(folder, dtype=torch.float32) for _ in range(2))
    quantize_decoder(ours, keep_unpacked=False)
    with torch.no_grad():
        for layer in reference.layers:
            for child in layer.children():
                child.weight.copy_(dequantize(*quantize(child.weight)))
    prompts = [torch.arange(3), torch.arange(5, 25)]
    for got, expected in zip(paged_logits(ours, prompts, (1, 5)), paged_logits(reference, prompts, (1, 5)), strict=True):
        assert relative_error(got, expected) < 1e-4


def test_what_the_kernel_does_not_serve_is_refused_by_name(make_model: MakeModel) -> None:
    with pytest.raises(ValueError, match="multiple of 16 rows and 32 columns; this model has one of 64 x 20"):
        quantize(torch.zeros(64, 20))
    folder, _ = make_model("llama")
    with pytest.raises(ValueError, match=r"serves bfloat16 and float32 on CPUs, not torch\.float16"):
        quantize_decoder(load_model(folder, dtype=torch.float16), keep_unpacked=False)
