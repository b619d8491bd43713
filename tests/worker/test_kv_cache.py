"""How many blocks the pool has, and what they are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minivllm.config import EngineConfig
from minivllm.models.registry import ModelConfig
from minivllm.worker import kv_cache
from minivllm.worker.kv_cache import allocate_kv_caches, bytes_per_block, num_kv_blocks

MODEL = ModelConfig(
    "LlamaForCausalLM", 100, 32, 64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, max_position_embeddings=64
)
BLOCK = 2 * 3 * 4 * 2 * 8 * 4  # keys and values, layers, slots, kv heads, head_dim, bytes


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(**{"block_size": 4, "max_num_seqs": 2, **settings}).resolved("cpu")


@pytest.fixture(autouse=True)
def ram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_memory", lambda: 100 * BLOCK)


def test_bytes_of_a_block_are_keys_and_values_of_every_layer() -> None:
    assert bytes_per_block(MODEL, 4, torch.float32) == BLOCK
    assert bytes_per_block(MODEL, 4, torch.bfloat16) == BLOCK // 2


def test_the_default_is_a_quarter_of_the_free_ram() -> None:
    assert num_kv_blocks(config(max_num_seqs=64), MODEL, torch.float32) == 25


def test_the_default_is_no_more_than_the_longest_requests_can_fill() -> None:
    assert num_kv_blocks(config(max_num_seqs=1), MODEL, torch.float32) == 1 + 64 // 4
    assert num_kv_blocks(config(max_model_len=21), MODEL, torch.float32) == 1 + 2 * 6


def test_bytes_asked_for_are_taken_as_they_are() -> None:
    assert num_kv_blocks(config(max_num_seqs=1, kv_cache_memory_bytes=50 * BLOCK + 1), MODEL, torch.float32) == 50


def test_an_override_counts_the_null_block() -> None:
    assert num_kv_blocks(config(num_gpu_blocks_override=7, kv_cache_memory_bytes=1), MODEL, torch.float32) == 7


@pytest.mark.parametrize("setting", [{"kv_cache_memory_bytes": 101 * BLOCK}, {"num_gpu_blocks_override": 101}])
def test_more_than_there_is_is_refused_by_name(setting: dict[str, int]) -> None:
    name, value = next(iter(setting.items()))
    with pytest.raises(ValueError, match=rf"{name}={value} asks for .* are free. Lower it"):
        num_kv_blocks(config(**setting), MODEL, torch.float32)


def test_too_little_says_how_much_is_enough() -> None:
    with pytest.raises(ValueError, match=rf"kv_cache_memory_bytes=100 holds 0 blocks of 4 .* to {2 * BLOCK} or more"):
        num_kv_blocks(config(kv_cache_memory_bytes=100), MODEL, torch.float32)
    lower = r"gpu_memory_utilization=0\.9 \(0 MiB\) holds 0 blocks .* lower max_num_batched_tokens and max_num_seqs"
    with pytest.raises(ValueError, match=lower):
        num_kv_blocks(config(), MODEL, torch.float32, gpu_memory=-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_caches_are_aligned_zeros_one_a_layer(dtype: torch.dtype) -> None:
    caches = allocate_kv_caches(5, 4, MODEL, dtype, torch.device("cpu"))
    assert len(caches) == 3
    for cache in caches:
        assert cache.shape == (2, 5, 4, 2, 8)
        assert cache.dtype == dtype and cache.is_contiguous()
        assert cache.data_ptr() % 64 == 0
        assert not cache.any()
        cache[:, 1] = 1  # writable, and not shared with the next layer
    assert not caches[0][:, 0].any()
