"""Prefill through PyTorch's fused attention, one sequence at a time: what the CPU backend uses, and GPUs on which the Triton
kernels do not run, or run without matrix instructions. May not know how a step was scheduled.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from minivllm.attention.naive import gather_kv


def causal_mask(T: int, S: int, sliding_window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[T, S], added to scores: 0 where query i, at position S - T + i, sees position j, else -inf.

    T = 3, S = 5         0    0    0  -inf -inf
                         0    0    0    0  -inf
                         0    0    0    0    0       the corner at the bottom right
    """
    mask = torch.full((T, S), float("-inf"), dtype=dtype, device=device).triu_(S - T + 1)
    if sliding_window is not None:
        mask += torch.full((T, S), float("-inf"), dtype=dtype, device=device).tril_(S - T - sliding_window)
    return mask


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
    """As `reference.paged_prefill`, through PyTorch's fused kernel: one call per sequence, in the model's dtype.

    A whole prompt says `is_causal` (the kernel then skips the upper half, 1.5 times as fast); a chunk after a prefix needs its
    mask spelled out, because to PyTorch "causal" means the top left corner.
    """
    out = torch.empty_like(q)
    starts = query_start_loc.tolist()
    for i, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        k, v = gather_kv(kv_cache, block_tables[i], seq_len)
        T = rows.stop - rows.start
        if sliding_window is not None and T + sliding_window <= seq_len:  # nobody here sees further back than this
            k, v = k[1 - T - sliding_window :], v[1 - T - sliding_window :]
        if q.is_cuda:  # its fused kernels take no mask, or no GQA, or both: the fallback is the product written out
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        S = len(k)
        whole = T == S and (sliding_window is None or sliding_window >= S)
        attended = scaled_dot_product_attention(
            q[rows].transpose(0, 1)[None],  # [1, H, T, D]
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=None if whole else causal_mask(T, S, sliding_window, q.dtype, q.device),
            is_causal=whole,
            scale=scale,
            enable_gqa=True,
        )
        out[rows] = attended[0].transpose(0, 1)
    return out
