"""The decoder: one module for Llama, Mistral, Qwen2 and Qwen3, shaped by a ModelConfig. Lab 01 builds `decoder_layer`.

    token ids -> embedding -> | norm, qkv, rope, attention, o_proj, + | norm, gate_up, silu *, down_proj, + |  x num_layers
              -> norm -> hidden states;  hidden states of the rows to sample -> logits

The `+` adds to the residual stream, which every layer reads and none overwrites. May not know requests, blocks or sampling: a
step is a flat batch of tokens with positions, and an AttentionMetadata that is only passed on to the attention backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from minivllm.attention.interface import AttentionBackend, AttentionMetadata, paged_attention
from minivllm.attention.naive import causal_attention
from minivllm.attention.reference import REFERENCE
from minivllm.models.layers import rms_norm, silu_and_mul
from minivllm.models.linear import Linear
from minivllm.models.registry import ModelConfig
from minivllm.models.rope import apply_rope, inverse_frequencies, rotary_table, rotate

# attend(q [T, H, D], k [T, Hkv, D], v [T, Hkv, D], *, scale, sliding_window) -> [T, H, D]
Attend = Callable[..., torch.Tensor]


class Decoder(nn.Module):
    """A decoder-only transformer with empty weights; `weights.load_model` fills them through `checkpoint_tensors`.

    `attention_backend` is set by whoever owns the KV caches; it starts as the reference.
    """

    layers: Sequence[DecoderLayer]
    frequencies: torch.Tensor  # of rope, radians per position; float32 whatever the model's dtype

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.config = config
        self.attention_backend: AttentionBackend = REFERENCE
        self.embed_tokens = _empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(  # type: ignore[assignment]
            DecoderLayer(config, window, dtype, device) for window in config.sliding_window
        )
        self.norm = _empty(config.hidden_size, dtype=dtype, device=device)
        tied = config.tie_word_embeddings
        head = None if tied else Linear(config.hidden_size, {"lm_head": config.vocab_size}, dtype=dtype, device=device)
        self.lm_head = head  # None: logits come from embed_tokens
        self.register_buffer("frequencies", inverse_frequencies(config.rope, config.head_dim).to(device), persistent=False)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        meta: AttentionMetadata,
        inputs_embeds: torch.Tensor | None = None,
        aux_layers: Sequence[int] = (),
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """One step of a flat batch. input_ids [T] int64 (or inputs_embeds [T, hidden]), positions [T] int64, a KV cache per
        layer; returns hidden states [T, hidden] after the final norm, for `logits`.

        With `aux_layers` it returns (hidden, [aux, ...]): for each i in them, ascending, the residual stream [T, hidden] as it
        enters layer i; i = num_layers is what leaves the last layer, before the norm. EAGLE drafters read these.
        """
        if aux_layers and not all(0 <= i <= self.config.num_layers for i in aux_layers):
            raise ValueError(f"aux_layers={list(aux_layers)} must lie in 0..{self.config.num_layers}, the number of layers.")
        if input_ids is not None and inputs_embeds is None:
            x = F.embedding(input_ids, self.embed_tokens)
        elif inputs_embeds is not None and input_ids is None:
            x = inputs_embeds
        else:
            raise ValueError("forward() takes input_ids or inputs_embeds: one of them, not both.")
        cos, sin = rotary_table(positions, self.frequencies, x.dtype)
        aux = []
        for i, (layer, kv_cache) in enumerate(zip(self.layers, kv_caches, strict=True)):
            if i in aux_layers:
                aux.append(x)
            x = layer(x, cos, sin, partial(paged_attention, self.attention_backend, kv_cache=kv_cache, meta=meta))
        if self.config.num_layers in aux_layers:
            aux.append(x)
        hidden = rms_norm(x, self.norm, self.config.rms_norm_eps)
        return (hidden, aux) if aux_layers else hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden_size], of the rows that will be sampled only -> [N, vocab_size], in the model's dtype."""
        return F.linear(hidden, self.embed_tokens) if self.lm_head is None else self.lm_head(hidden)

    @torch.inference_mode()
    def full_forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits [T, vocab_size] of one whole sequence, token_ids [T] int64, computed from nothing: no cache, naive attention.
        What Labs 01 and 02 call, and the oracle the paged path is tested against.
        """
        positions = torch.arange(len(token_ids), device=token_ids.device)
        return self.logits(self.run_layers(F.embedding(token_ids, self.embed_tokens), positions, causal_attention))

    def run_layers(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The layers and the last norm over embeddings x [T, hidden] -> [T, hidden]. `attend` is called once a layer, in
        order."""
        cos, sin = rotary_table(positions, self.frequencies, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return rms_norm(x, self.norm, self.config.rms_norm_eps)

    def checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of this model's Hugging Face checkpoint: its name there and the memory it goes to, often a slice."""
        yield "model.embed_tokens.weight", self.embed_tokens
        for i, layer in enumerate(self.layers):
            for name, tensor in layer.checkpoint_tensors():
                yield f"model.layers.{i}.{name}", tensor
        yield "model.norm.weight", self.norm
        if self.lm_head is not None:
            yield from self.lm_head.named_slices()

    def layer_weights(self, index: int) -> LayerWeights:
        """One layer's weights for `decoder_layer`: views, no copies. Raises ValueError if the layer is no plain Llama layer."""
        config = self.config
        extras = {
            "biases": config.attention_bias or config.mlp_bias,
            "q and k norms": config.qk_norm,
            "a sliding window": self.layers[index].sliding_window is not None,
            f"rope scaling {config.rope.rope_type!r}": config.rope.rope_type != "default",
        }
        if any(extras.values()):
            has = " and ".join(name for name, present in extras.items() if present)
            raise ValueError(f"decoder_layer() computes a plain Llama layer; this {config.architecture} has {has}.")
        parts = {name.split(".")[-2]: tensor for name, tensor in self.layers[index].checkpoint_tensors()}
        return LayerWeights(**parts, head_dim=config.head_dim, rms_norm_eps=config.rms_norm_eps, rope_theta=config.rope.theta)


class DecoderLayer(nn.Module):
    """One layer, with its projections packed. Biases, q and k norms and the window are there if the config says so."""

    def __init__(self, config: ModelConfig, sliding_window: int | None, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.config = config
        self.sliding_window = sliding_window
        linear = partial(Linear, dtype=dtype, device=device)
        H, D = config.hidden_size, config.head_dim
        q, kv = config.num_heads * D, config.num_kv_heads * D
        self.input_layernorm = _empty(H, dtype=dtype, device=device)
        self.qkv_proj = linear(H, {"q_proj": q, "k_proj": kv, "v_proj": kv}, bias=config.attention_bias)
        self.o_proj = linear(q, {"o_proj": H}, bias=config.attention_out_bias)
        self.post_attention_layernorm = _empty(H, dtype=dtype, device=device)
        intermediate = config.intermediate_size
        self.gate_up_proj = linear(H, {"gate_proj": intermediate, "up_proj": intermediate}, bias=config.mlp_bias)
        self.down_proj = linear(intermediate, {"down_proj": H}, bias=config.mlp_bias)
        if config.qk_norm:
            self.q_norm = _empty(D, dtype=dtype, device=device)
            self.k_norm = _empty(D, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The residual stream x [T, hidden], one layer on. `attend` is causal attention, over a paged cache or over none."""
        eps = self.config.rms_norm_eps
        q, k, v = self._qkv(rms_norm(x, self.input_layernorm, eps), cos, sin)
        attended = attend(q, k, v, scale=self.config.head_dim**-0.5, sliding_window=self.sliding_window)
        x = x + self.o_proj(attended.flatten(1))
        h = rms_norm(x, self.post_attention_layernorm, eps)
        mlp_out: torch.Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(h)))
        return x + mlp_out

    def _qkv(self, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, H, D], k and v [T, Hkv, D], q and k turned. They are slices of shared memory: not contiguous."""
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = self.qkv_proj(h).view(h.shape[0], num_heads + 2 * num_kv_heads, self.config.head_dim)
        qk, v = qkv[:, :-num_kv_heads], qkv[:, -num_kv_heads:]
        if self.config.qk_norm:
            q, k, eps = qk[:, :num_heads], qk[:, num_heads:], self.config.rms_norm_eps
            qk = torch.cat([rms_norm(q, self.q_norm, eps), rms_norm(k, self.k_norm, eps)], dim=1)
        qk = rotate(qk, cos, sin)  # both at once: half as many kernels
        return qk[:, :num_heads], qk[:, num_heads:], v

    def checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "input_layernorm.weight", self.input_layernorm
        for linear in (self.qkv_proj, self.o_proj):
            yield from ((f"self_attn.{name}", tensor) for name, tensor in linear.named_slices())
        if self.config.qk_norm:
            yield "self_attn.q_norm.weight", self.q_norm
            yield "self_attn.k_norm.weight", self.k_norm
        yield "post_attention_layernorm.weight", self.post_attention_layernorm
        for linear in (self.gate_up_proj, self.down_proj):
            yield from ((f"mlp.{name}", tensor) for name, tensor in linear.named_slices())


@dataclass(frozen=True)
class LayerWeights:
    """One plain Llama layer as its checkpoint has it: matrices [out, in], norms [hidden]."""

    input_layernorm: torch.Tensor
    q_proj: torch.Tensor
    k_proj: torch.Tensor
    v_proj: torch.Tensor
    o_proj: torch.Tensor
    post_attention_layernorm: torch.Tensor
    gate_proj: torch.Tensor
    up_proj: torch.Tensor
    down_proj: torch.Tensor
    head_dim: int
    rms_norm_eps: float
    rope_theta: float


def decoder_layer(x: torch.Tensor, weights: LayerWeights, positions: torch.Tensor) -> torch.Tensor:
    """One Llama layer, nothing packed and nothing cached: what `DecoderLayer` computes, in the order the paper tells it.

    x [T, hidden] is the residual stream, positions [T]; returns [T, hidden].
    """
    w, eps = weights, weights.rms_norm_eps
    h = rms_norm(x, w.input_layernorm, eps)
    q, k, v = (F.linear(h, matrix).view(len(x), -1, w.head_dim) for matrix in (w.q_proj, w.k_proj, w.v_proj))
    q, k = apply_rope(q, positions, w.rope_theta), apply_rope(k, positions, w.rope_theta)
    x = x + F.linear(causal_attention(q, k, v).flatten(1), w.o_proj)
    h = rms_norm(x, w.post_attention_layernorm, eps)
    return x + F.linear(F.silu(F.linear(h, w.gate_proj)) * F.linear(h, w.up_proj), w.down_proj)


def _empty(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)
