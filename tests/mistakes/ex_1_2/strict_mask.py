# expect: itself included
import torch


def causal_attention(q, k, v, *, scale=None, sliding_window=None):
    T, H, D = q.shape
    S, Hkv, _ = k.shape
    k = k.float().repeat_interleave(H // Hkv, dim=1)
    v = v.float().repeat_interleave(H // Hkv, dim=1)
    scores = torch.einsum("thd,shd->hts", q.float(), k) * (D**-0.5 if scale is None else scale)
    q_positions = torch.arange(S - T, S)[:, None]
    k_positions = torch.arange(S)[None, :]
    hidden = k_positions >= q_positions
    if sliding_window is not None:
        hidden = hidden | (k_positions <= q_positions - sliding_window)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v).to(q.dtype)
