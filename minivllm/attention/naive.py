"""Attention written as its definition: softmax(q k^T * scale) v under a causal mask. Lab 01 builds `causal_attention`.

It may not know the paged layout, except in the last three functions, which gather one request at a time and call it. Nothing
here is fast: it is the oracle every other backend is tested against, and what `Decoder.full_forward` uses.
"""

from __future__ import annotations

import torch

from minivllm.attention.interface import AttentionBackend


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Causal attention of one sequence. q [T, H, D], k and v [S, Hkv, D] with S >= T; returns [T, H, D] in q's dtype.

    The T queries are the *last* T of the S positions (a bottom-right mask): query i is at position S - T + i and sees positions
    0 .. S - T + i, or with `sliding_window` w only the last w of these. H is a multiple of Hkv: query head h reads kv head
    h // (H // Hkv) (grouped-query attention). `scale` defaults to 1 / sqrt(D). Scores and softmax are in float32 at least.
    """
    T, H, D = q.shape
    S, num_kv_heads, _ = k.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    k_SHD = k.to(wide).repeat_interleave(H // num_kv_heads, dim=1)
    v_SHD = v.to(wide).repeat_interleave(H // num_kv_heads, dim=1)
    scores_HTS = torch.einsum("thd,shd->hts", q.to(wide), k_SHD) * (D**-0.5 if scale is None else scale)

    q_positions = torch.arange(S - T, S, device=q.device)[:, None]
    k_positions = torch.arange(S, device=q.device)[None, :]
    hidden = k_positions > q_positions
    if sliding_window is not None:
        hidden = hidden | (k_positions <= q_positions - sliding_window)
    scores_HTS = scores_HTS.masked_fill(hidden, float("-inf"))
    return torch.einsum("hts,shd->thd", scores_HTS.softmax(-1), v_SHD).to(q.dtype)


def gather_kv(kv_cache: torch.Tensor, block_table: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [seq_len, Hkv, D] of one request, copied out of its blocks into one contiguous piece."""
    block_size = kv_cache.shape[2]
    blocks = block_table[: -(-seq_len // block_size)].long()
    k, v = kv_cache[:, blocks].flatten(1, 2)[:, :seq_len]
    return k, v


def naive_write_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """One token at a time, block and offset spelled out."""
    block_size = kv_cache.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        kv_cache[0, slot // block_size, slot % block_size] = key[token]
        kv_cache[1, slot // block_size, slot % block_size] = value[token]


def naive_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """One request at a time: gather its keys and values, then `causal_attention`."""
    out = torch.empty_like(q)
    starts = query_start_loc.tolist()
    for i, seq_len in enumerate(seq_lens.tolist()):
        k, v = gather_kv(kv_cache, block_tables[i], seq_len)
        rows = slice(starts[i], starts[i + 1])
        out[rows] = causal_attention(q[rows], k, v, scale=scale, sliding_window=sliding_window)
    return out


def naive_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """A decode is a prefill of one token each."""
    starts = torch.arange(len(seq_lens) + 1)
    return naive_prefill(q, kv_cache, starts, block_tables, seq_lens, scale=scale, sliding_window=sliding_window)


NAIVE = AttentionBackend(name="naive", write_kv=naive_write_kv, decode=naive_decode, prefill=naive_prefill)
