# expect: passed
import torch


def decoder_layer(x, weights, positions):
    T, _ = x.shape
    h = rms_norm(x, weights.input_layernorm, weights.rms_norm_eps)
    q = (h @ weights.q_proj.T).reshape(T, -1, weights.head_dim)
    k = (h @ weights.k_proj.T).reshape(T, -1, weights.head_dim)
    v = (h @ weights.v_proj.T).reshape(T, -1, weights.head_dim)
    attended = causal_attention(apply_rope(q, positions, weights.rope_theta), apply_rope(k, positions, weights.rope_theta), v)
    after = x + attended.reshape(T, -1) @ weights.o_proj.T
    h = rms_norm(after, weights.post_attention_layernorm, weights.rms_norm_eps)
    gate = h @ weights.gate_proj.T
    return after + (gate * torch.sigmoid(gate) * (h @ weights.up_proj.T)) @ weights.down_proj.T
