"""What one step costs, counted from a model's config: bytes read, floating-point operations, and the time they allow.
Labs 00 (`streamed_parameters`, `decode_step_bytes`, `step_time`) and 03 (`kv_bytes_per_token`, `max_concurrency`) build it.
May not know torch.

The picture is the roofline (Williams, Waterman, Patterson, 2009): a step takes as long as its memory traffic or its arithmetic,
whichever is longer. To it we add what starting one operation after another costs.
"""

from __future__ import annotations

from minivllm.models.registry import ModelConfig
from minivllm.sim.hardware import Device


def streamed_parameters(config: ModelConfig) -> int:
    """Weights every step reads, whatever the batch: the seven matrices of each layer, and the one that makes logits.

    Left out, as less than a hundredth of it: norms and biases, and the one row of the embedding a token looks up.
    """
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (q + kv + kv) + q * config.hidden_size  # q, k and v in; o out
    mlp = 3 * config.hidden_size * config.intermediate_size  # gate, up and down
    return config.num_layers * (attention + mlp) + config.hidden_size * config.vocab_size


def kv_bytes_per_token(config: ModelConfig, dtype_bytes: int = 2) -> int:
    """Bytes of KV cache one token keeps: a key and a value, for each layer and KV head."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype_bytes


def max_concurrency(memory_bytes: int, max_model_len: int, bytes_per_token: int) -> int:
    """How many sequences fit when each reserves `max_model_len` tokens up front."""
    return memory_bytes // (max_model_len * bytes_per_token)


def decode_step_bytes(config: ModelConfig, batch_size: int, context_len: int, dtype_bytes: int) -> int:
    """Bytes one decode step reads at least: the weights once for the whole batch, and the KV of each sequence, `context_len`
    tokens long."""
    weights = streamed_parameters(config) * dtype_bytes
    return weights + batch_size * context_len * kv_bytes_per_token(config, dtype_bytes)


def decode_step_flops(config: ModelConfig, batch_size: int, context_len: int) -> int:
    """Floating-point operations of one decode step: for each sequence a multiply and an add per weight, and attention's two
    products over `context_len` tokens."""
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * context_len
    return batch_size * (2 * streamed_parameters(config) + attention)


def step_time(flops: float, bytes: float, launches: float, device: Device) -> float:
    """Seconds a step takes at least: the longer of arithmetic and memory traffic, which overlap, plus the launches.

    A model, and where it breaks: on a GPU launches run ahead of the work and hide behind long operations (so the truth lies
    between this and the longest of the three), and small matrices reach neither ceiling.
    """
    return max(flops / device.flops, bytes / device.bandwidth) + launches * device.launch_overhead
