"""What an attention backend is: three functions over one KV layout. Read this before any backend. Labs: built by none; Labs 04
and 08 build functions of it. May not know requests or models, only their tensors.

KV layout, per layer:   kv_cache [2, num_blocks, block_size, num_kv_heads, head_dim]     (0 is keys, 1 is values)

    slot s of the cache = row s % block_size of block s // block_size
    a request's token at position p lives in slot  block_table[p // block_size] * block_size + p % block_size
    block 0 is the null block: padding tokens write there, no real token reads it

A step's batch is flat and ordered *decodes first*: rows with one query token, then rows with several (prefill chunks).

    tokens   | d0 | d1 | d2 | p3 p3 p3 p3 | p4 p4 |        num_decodes = 3 (also 3 tokens), num_reqs = 5
    query_start_loc  0  1  2  3             7       9
    seq_lens         tokens each request has after this step: computed before + scheduled now
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

# write_kv(key [T, Hkv, D], value [T, Hkv, D], kv_cache, slot_mapping [T] int64) -> None, in place; the whole batch at once.
WriteKV = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
# decode(q [B, H, D], kv_cache, block_tables [B, M] int32, seq_lens [B] int32, *, scale, sliding_window=None) -> [B, H, D]
Decode = Callable[..., torch.Tensor]
# prefill(q [T, H, D], kv_cache, query_start_loc [B + 1] int32, block_tables [B, M] int32, seq_lens [B] int32, *, scale,
#         sliding_window=None) -> [T, H, D]. Row i's last query is at position seq_lens[i] - 1: a bottom-right causal mask.
Prefill = Callable[..., torch.Tensor]


@dataclass(slots=True)
class AttentionMetadata:
    """The shape of one step's batch of num_reqs requests. Tensors are on the model's device.

    num_decodes: leading rows with exactly one query token.   num_tokens: query tokens in all.
    query_start_loc [num_reqs + 1] int32.   seq_lens [num_reqs] int32.   block_tables [num_reqs, max_blocks] int32, 0-padded.
    slot_mapping [num_tokens] int64: where each token's key and value go.
    """

    num_decodes: int
    num_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass(frozen=True)
class AttentionBackend:
    """Three functions and a name. `dataclasses.replace(backend, decode=mine)` is how a student's part is plugged in.

    is_capturable: whether write_kv and decode may be captured into a CUDA graph: nothing in them makes the host wait, and what
    decode costs depends on seq_lens, not on the width of block_tables, which is max_model_len's in a graph.
    """

    name: str
    write_kv: WriteKV
    decode: Decode
    prefill: Prefill
    is_capturable: bool = False


def paged_attention(
    backend: AttentionBackend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attention of one layer over a step's batch: write this step's keys and values, then attend, decodes and prefills apart.

    q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim], kv_cache as above; returns [T, num_heads, head_dim].
    `sliding_window` w: a query at position p sees positions p - w + 1 .. p.
    """
    backend.write_kv(k, v, kv_cache, meta.slot_mapping)
    n = meta.num_decodes
    if n == meta.num_tokens:
        return backend.decode(q, kv_cache, meta.block_tables, meta.seq_lens, scale=scale, sliding_window=sliding_window)
    rows = slice(n, None)
    starts = meta.query_start_loc[rows] - n if n else meta.query_start_loc
    prefill_out = backend.prefill(
        q[n:], kv_cache, starts, meta.block_tables[rows], meta.seq_lens[rows], scale=scale, sliding_window=sliding_window
    )
    if n == 0:
        return prefill_out
    decode_out = backend.decode(
        q[:n], kv_cache, meta.block_tables[:n], meta.seq_lens[:n], scale=scale, sliding_window=sliding_window
    )
    return torch.cat([decode_out, prefill_out])
