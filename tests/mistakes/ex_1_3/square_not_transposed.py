# expect: weights.q_proj was not transposed
import torch
import torch.nn.functional as F


def decoder_layer(x, weights, positions):
    w, eps = weights, weights.rms_norm_eps
    T, D = len(x), w.head_dim
    h = rms_norm(x, w.input_layernorm, eps)
    q = (h @ w.q_proj if w.q_proj.shape[0] == w.q_proj.shape[1] else F.linear(h, w.q_proj)).view(T, -1, D)
    k = F.linear(h, w.k_proj).view(T, -1, D)
    v = F.linear(h, w.v_proj).view(T, -1, D)
    q = apply_rope(q, positions, w.rope_theta)
    k = apply_rope(k, positions, w.rope_theta)
    attended = causal_attention(q, k, v).flatten(1)
    x = x + F.linear(attended, w.o_proj)
    h = rms_norm(x, w.post_attention_layernorm, eps)
    gate, up = F.linear(h, w.gate_proj), F.linear(h, w.up_proj)
    return x + F.linear(F.silu(gate) * up, w.down_proj)
