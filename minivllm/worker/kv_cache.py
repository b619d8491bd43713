"""The KV pool: how many blocks there are, and the memory they live in. May not know requests or the scheduler.

bytes of a block = 2 (keys, values) * layers * block_size * kv heads * head_dim * bytes of the dtype
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from minivllm.config import EngineConfig
from minivllm.models.registry import ModelConfig
from minivllm.worker.device import available_memory

logger = logging.getLogger("minivllm")

CPU_SHARE = 0.25  # of the RAM that is free at start
CPU_DEFAULT_LIMIT = 4 << 30
_ALIGNMENT = 64  # a cache line


def bytes_per_block(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    return 2 * model.num_layers * block_size * model.num_kv_heads * model.head_dim * dtype.itemsize


def num_kv_blocks(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    gpu_memory: int | None = None,
    drafter: ModelConfig | None = None,
) -> int:
    """Blocks in the pool, the null block included. `gpu_memory`: bytes a GPU has left for it; None on a CPU.

    `num_gpu_blocks_override` decides, else `kv_cache_memory_bytes`, else the memory there is; the last is capped by what
    max_num_seqs sequences of the longest length can use. Raises ValueError if there is no room, or more is asked than there is.
    """
    block = bytes_per_block(model, config.block_size, dtype)
    if drafter is not None:  # its layers are further layers of the same blocks
        block += bytes_per_block(drafter, config.block_size, dtype)
    if config.num_gpu_blocks_override is not None:
        _refuse_more_than_there_is(
            f"num_gpu_blocks_override={config.num_gpu_blocks_override}", config.num_gpu_blocks_override * block, gpu_memory
        )
        return config.num_gpu_blocks_override
    if config.kv_cache_memory_bytes is not None:
        wanted = config.kv_cache_memory_bytes
        _refuse_more_than_there_is(f"kv_cache_memory_bytes={wanted}", wanted, gpu_memory)
        setting, num_blocks = f"kv_cache_memory_bytes={wanted}", wanted // block
    else:
        if gpu_memory is None:
            setting, memory = "a quarter of the free RAM", min(int(available_memory() * CPU_SHARE), CPU_DEFAULT_LIMIT)
        else:
            setting, memory = f"gpu_memory_utilization={config.gpu_memory_utilization}", max(0, gpu_memory)
        longest = config.max_model_len or model.max_position_embeddings
        assert config.max_num_seqs is not None, "the config is resolved"
        useful = config.max_num_seqs * -(-longest // config.block_size) + 1
        num_blocks = min(memory // block, useful)
        setting += f" ({memory / 2**20:.0f} MiB)"
    if num_blocks < 2:
        fix = "free some memory"
        if gpu_memory is not None:
            fix = (
                "raise gpu_memory_utilization, lower max_num_batched_tokens and max_num_seqs (a step takes what they allow),"
                " end other programs that use the GPU (nvidia-smi lists them)"
            )
        if config.kv_cache_memory_bytes is not None:
            fix = f"raise kv_cache_memory_bytes to {2 * block} or more"
        raise ValueError(
            f"No room for a KV cache: {setting} holds {num_blocks} blocks of {config.block_size} tokens ({block} bytes each),"
            f" and 2 are the least, one of them the null block. To fix: {fix}, or lower block_size."
        )
    return int(num_blocks)


def _refuse_more_than_there_is(setting: str, wanted: int, gpu_memory: int | None) -> None:
    there_is = available_memory() if gpu_memory is None else gpu_memory
    if wanted > there_is:
        raise ValueError(
            f"{setting} asks for a KV cache of {wanted / 2**30:.2f} GiB, and {max(0, there_is) / 2**30:.2f} GiB are free."
            " Lower it."
        )


def allocate_kv_caches(
    num_blocks: int, block_size: int, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """A cache [2, num_blocks, block_size, num_kv_heads, head_dim] of zeros for each layer."""
    shape = (2, num_blocks, block_size, model.num_kv_heads, model.head_dim)
    make = _lazy_zeros if device.type == "cpu" else torch.zeros
    return [make(shape, dtype=dtype, device=device) for _ in range(model.num_layers)]


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that cost memory when they are first touched: NumPy asks the system for zero pages (huge ones, where it can) where
    torch would write gigabytes at start. Aligned to a cache line, so that rows do not straddle one more than they must."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)
