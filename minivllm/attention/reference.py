"""Paged attention in plain PyTorch: the answers to Lab 04's exercises 4.4 and 4.5, and the fallback backend on any device.

Nothing here is written in place of clarity: the price of `paged_decode` is that it copies every block of the batch out of the
cache before it multiplies, padding included. `cpu.py` and the Triton kernels exist because of that copy. May not know requests,
blocks' owners, or the scheduler: only tensors.
"""

from __future__ import annotations

import torch

from minivllm.attention.interface import AttentionBackend
from minivllm.attention.naive import naive_prefill


def write_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Scatter key and value [T, Hkv, D] of a step's T tokens into kv_cache [2, num_blocks, block_size, Hkv, D], in place.

    Token t goes to slot_mapping[t]. Slots number the rows of all blocks in order, so with blocks and rows flattened into one
    dimension a slot is an index.
    """
    k_slots, v_slots = kv_cache.flatten(1, 2)
    k_slots.index_copy_(0, slot_mapping, key)
    v_slots.index_copy_(0, slot_mapping, value)


def paged_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attention of one new token per sequence over its whole paged history.

    q [B, H, D], block_tables [B, M] (0-padded), seq_lens [B] (the new token included); returns [B, H, D] in q's dtype. Slots
    at or beyond seq_len hold whatever an earlier owner left there, perhaps NaN: their scores *and their values* are masked,
    because a weight of 0 times NaN is NaN. `scale` defaults to 1 / sqrt(D); `sliding_window` w: only the last w tokens are
    seen.
    """
    B, H, D = q.shape
    num_kv_heads = kv_cache.shape[3]
    k_BSHD, v_BSHD = kv_cache[:, block_tables.long()].flatten(2, 3).float()
    positions = torch.arange(k_BSHD.shape[1], device=q.device)
    visible = positions < seq_lens[:, None]
    if sliding_window is not None:
        visible &= positions >= seq_lens[:, None] - sliding_window

    q_BHGD = q.float().view(B, num_kv_heads, H // num_kv_heads, D)  # G query heads share a kv head
    scores_BHGS = torch.einsum("bhgd,bshd->bhgs", q_BHGD, k_BSHD) * (D**-0.5 if scale is None else scale)
    weights_BHGS = scores_BHGS.masked_fill(~visible[:, None, None, :], float("-inf")).softmax(-1)
    v_BSHD = v_BSHD.masked_fill(~visible[:, :, None, None], 0.0)
    return torch.einsum("bhgs,bshd->bhgd", weights_BHGS, v_BSHD).reshape(B, H, D).to(q.dtype)


def paged_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attention of several new tokens per sequence (a prompt, or a chunk of one).

    q [T, H, D] holds the sequences' queries one after another: sequence i's are q[query_start_loc[i] : query_start_loc[i +
    1]], and the last of them is at position seq_lens[i] - 1. Returns [T, H, D].
    """
    return naive_prefill(q, kv_cache, query_start_loc, block_tables, seq_lens, scale=scale, sliding_window=sliding_window)


REFERENCE = AttentionBackend(name="reference", write_kv=write_kv, decode=paged_decode, prefill=paged_prefill)
