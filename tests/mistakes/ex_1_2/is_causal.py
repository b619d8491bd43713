# expect: is_causal
import torch
import torch.nn.functional as F


def causal_attention(q, k, v, *, scale=None, sliding_window=None):
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
