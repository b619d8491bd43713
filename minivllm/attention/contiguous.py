"""The KV cache before paging: one piece of memory, reserved for the longest sequence there could be. Lab 03 builds `append` and
`view`; only labs use this file. May not know blocks, tables, or the scheduler.

    keys of one layer, room for max_len = 8      | k0 | k1 | k2 | k3 | k4 |  . |  . |  . |
    (values lie beside them)                       '---- lengths[layer] = 5 --'   reserved, and of no use to anybody else

A token's key and value never change, for no token sees a later one. So they are kept, and a step computes its new tokens alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention

from minivllm.attention.naive import causal_attention
from minivllm.models.decoder import Attend, Decoder
from minivllm.models.layers import rms_norm
from minivllm.models.rope import rotary_table


class ContiguousKVCache:
    """Keys and values of one sequence, at most `max_len` tokens. `kv` is [num_layers, 2, max_len, num_kv_heads, head_dim] (0 is
    keys, 1 is values). `lengths[layer]` counts the tokens a layer holds; each has its own, for a step fills one after another.

    A static batch of B sequences is one such cache with B * num_kv_heads heads: all its sequences have the same length.
    """

    def __init__(
        self,
        num_layers: int,
        max_len: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.max_len = max_len
        self.kv = torch.zeros(num_layers, 2, max_len, num_kv_heads, head_dim, dtype=dtype, device=device)
        self.lengths = [0] * num_layers

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep the keys and values [T, num_kv_heads, head_dim] of a layer's next T tokens. Raises ValueError, keeping nothing,
        when there is no room for all of them."""
        start = self.lengths[layer]
        end = start + len(k)
        if end > self.max_len:
            raise ValueError(
                f"The cache is full: layer {layer} holds {start} of {self.max_len} tokens, and {len(k)} more came."
            )
        self.kv[layer, 0, start:end] = k
        self.kv[layer, 1, start:end] = v
        self.lengths[layer] = end

    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [S, num_kv_heads, head_dim] of the S tokens a layer holds: slices of the cache, not copies."""
        length = self.lengths[layer]
        return self.kv[layer, 0, :length], self.kv[layer, 1, :length]


@torch.inference_mode()
def forward_with_cache(
    decoder: Decoder, token_ids: torch.Tensor, positions: torch.Tensor, cache: ContiguousKVCache
) -> torch.Tensor:
    """Logits [T, vocab_size] of the next T tokens of one sequence, token_ids and positions [T]. What came before is read from
    the cache, and the T tokens' keys and values join it."""
    x = F.embedding(token_ids, decoder.embed_tokens)
    cos, sin = rotary_table(positions, decoder.frequencies, x.dtype)
    for i, layer in enumerate(decoder.layers):
        x = layer(x, cos, sin, _attend_one(cache, i))
    return decoder.logits(rms_norm(x, decoder.norm, decoder.config.rms_norm_eps))


def _attend_one(cache: ContiguousKVCache, layer: int) -> Attend:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, sliding_window: int | None) -> torch.Tensor:
        cache.append(layer, k, v)
        keys, values = cache.view(layer)
        return causal_attention(q, keys, values, scale=scale, sliding_window=sliding_window)

    return attend


@torch.inference_mode()
def forward_batch_with_cache(
    decoder: Decoder, token_ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: ContiguousKVCache
) -> torch.Tensor:
    """One step of a static batch: token_ids and positions [B, T]; returns logits [B, vocab_size] of the last column. That holds
    every sequence's newest token, as long as padding stands on the left.

    mask [B, S], of the S columns so far (the cached ones, then these T), is True at tokens and False at padding.
    """
    B, T = token_ids.shape
    x = F.embedding(token_ids.flatten(), decoder.embed_tokens)
    cos, sin = rotary_table(positions.flatten(), decoder.frequencies, x.dtype)
    for i, layer in enumerate(decoder.layers):
        x = layer(x, cos, sin, _attend_batch(cache, i, mask))
    last = x.view(B, T, -1)[:, -1]
    return decoder.logits(rms_norm(last, decoder.norm, decoder.config.rms_norm_eps))


def _attend_batch(cache: ContiguousKVCache, layer: int, mask: torch.Tensor) -> Attend:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, sliding_window: int | None) -> torch.Tensor:
        B, S = mask.shape
        T, D = len(q) // B, q.shape[-1]
        new_k, new_v = (x.view(B, T, -1, D).transpose(0, 1).flatten(1, 2) for x in (k, v))  # [T, B * Hkv, D]
        cache.append(layer, new_k, new_v)
        keys, values = (x.view(S, B, -1, D).permute(1, 2, 0, 3) for x in cache.view(layer))  # [B, Hkv, S, D]
        attended = scaled_dot_product_attention(
            q.view(B, T, -1, D).transpose(1, 2),  # [B, H, T, D]
            keys,
            values,
            attn_mask=visible_columns(mask, T, sliding_window)[:, None],
            scale=scale,
            enable_gqa=True,
        )
        return attended.transpose(1, 2).flatten(0, 1)

    return attend


def visible_columns(mask: torch.Tensor, num_queries: int, sliding_window: int | None = None) -> torch.Tensor:
    """Which of the columns of mask [B, S] each of the last `num_queries` columns sees: [B, num_queries, S] bool.

    A column sees itself and the tokens before it. Padding sees itself too: nobody reads what comes of it, but a softmax over
    nothing is NaN, and NaN in a cache spoils whatever it is multiplied with, zeros included.
    """
    S = mask.shape[1]
    columns = torch.arange(S, device=mask.device)
    queries = columns[S - num_queries :, None]
    causal = columns <= queries
    if sliding_window is not None:
        causal &= columns > queries - sliding_window
    return (causal & mask[:, None, :]) | (columns == queries)
