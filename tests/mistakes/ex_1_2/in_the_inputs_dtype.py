# expect: convert to float32 before you multiply
import torch


def causal_attention(q, k, v, *, scale=None, sliding_window=None):
    T, H, D = q.shape
    S, Hkv, _ = k.shape
    k, v = (t.repeat_interleave(H // Hkv, 1).transpose(0, 1) for t in (k, v))
    scores = (q.transpose(0, 1) @ k.transpose(1, 2)).float() * (D**-0.5 if scale is None else scale)
    query = torch.arange(T).add(S - T).unsqueeze(1)
    key = torch.arange(S).unsqueeze(0)
    keep = key <= query
    if sliding_window:
        keep = keep & (query - key < sliding_window)
    scores[:, ~keep] = float("-inf")
    return (torch.softmax(scores, dim=-1).to(q.dtype) @ v).transpose(0, 1)
