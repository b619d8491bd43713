"""Rotary embedding: the teaching function, the fast path and transformers agree."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from minivllm.models.registry import ModelConfig, RopeConfig
from minivllm.models.rope import apply_rope, inverse_frequencies, rotary_table, rotate

POSITIONS = torch.tensor([0, 1, 2, 7, 255, 256, 8191])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fast_path_equals_apply_rope_bit_for_bit(dtype: torch.dtype) -> None:
    x = torch.randn(7, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    table = rotary_table(POSITIONS, inverse_frequencies(RopeConfig(1e4), 16), dtype)
    assert torch.equal(rotate(x, *table), apply_rope(x, POSITIONS, 1e4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apply_rope_equals_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    x = torch.randn(7, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": 1e5})
    cos, sin = LlamaRotaryEmbedding(config)(x, POSITIONS[None])
    expected, _ = apply_rotary_pos_emb(x[None], x[None], cos, sin, unsqueeze_dim=2)
    assert torch.equal(apply_rope(x, POSITIONS, 1e5), expected[0])


def test_scores_depend_on_the_distance_of_two_positions_alone() -> None:
    q, k = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(0))

    def score(p: int, s: int) -> torch.Tensor:
        return (apply_rope(q, torch.tensor([p]), 1e4) * apply_rope(k, torch.tensor([s]), 1e4)).sum()

    torch.testing.assert_close(score(5, 2), score(25, 22), atol=1e-5, rtol=1e-5)
    assert not torch.isclose(score(5, 2), score(5, 3), atol=1e-3)


def test_position_0_is_left_as_it_is() -> None:
    x = torch.randn(1, 2, 8)
    assert torch.equal(apply_rope(x, torch.tensor([0]), 1e4), x)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
    ids=lambda p: p["rope_type"],
)
def test_frequencies_equal_transformers(parameters: dict[str, float]) -> None:
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=parameters)
    ours = ModelConfig.from_hf({**config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    torch.testing.assert_close(inverse_frequencies(ours.rope, 128), LlamaRotaryEmbedding(config).inv_freq, rtol=1e-6, atol=0)
