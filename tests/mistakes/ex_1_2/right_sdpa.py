# expect: passed
import torch
import torch.nn.functional as F


def causal_attention(q, k, v, *, scale=None, sliding_window=None):
    T, S = len(q), len(k)
    visible = torch.ones(T, S, dtype=torch.bool).tril(S - T)
    if sliding_window is not None:
        visible &= torch.ones(T, S, dtype=torch.bool).triu(S - T - sliding_window + 1)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)[0].transpose(0, 1)
