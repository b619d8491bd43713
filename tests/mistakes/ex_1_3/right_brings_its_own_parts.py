# expect: passed
import torch
import torch.nn as nn
from minivllm.attention.naive import causal_attention as attend
from minivllm.models.rope import apply_rope as turn


def norm(x, weight, eps):
    return x / torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight


def mlp(h, w):
    return nn.functional.silu(h @ w.gate_proj.t()).mul(h @ w.up_proj.t()) @ w.down_proj.t()


def attention(h, w, positions):
    split = lambda matrix: torch.matmul(h, matrix.t()).view(h.shape[0], matrix.shape[0] // w.head_dim, w.head_dim)
    q, k = (turn(split(m), positions, w.rope_theta) for m in (w.q_proj, w.k_proj))
    return attend(q, k, split(w.v_proj)).flatten(1) @ w.o_proj.t()


def decoder_layer(x, weights, positions):
    x = x.clone()
    x += attention(norm(x, weights.input_layernorm, weights.rms_norm_eps), weights, positions)
    x += mlp(norm(x, weights.post_attention_layernorm, weights.rms_norm_eps), weights)
    return x
