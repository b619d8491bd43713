# expect: passed
import torch
import torch.nn.functional as F


def decoder_layer(x, w, positions):
    D = w.head_dim
    heads = [len(m) // D for m in (w.q_proj, w.k_proj, w.v_proj)]
    qkv = F.linear(rms_norm(x, w.input_layernorm, w.rms_norm_eps), torch.cat([w.q_proj, w.k_proj, w.v_proj]))
    q, k, v = qkv.unflatten(-1, (sum(heads), D)).split(heads, dim=1)
    qk = apply_rope(torch.cat([q, k], dim=1), positions, w.rope_theta)
    out = causal_attention(qk[:, : heads[0]], qk[:, heads[0] :], v)
    x = torch.add(x, F.linear(out.flatten(-2), w.o_proj))
    gate_up = F.linear(rms_norm(x, w.post_attention_layernorm, w.rms_norm_eps), torch.cat([w.gate_proj, w.up_proj]))
    gate, up = gate_up.chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, w.down_proj)
