# expect: passed
import torch


def causal_attention(q, k, v, *, scale=None, sliding_window=None):
    T, H, D = q.shape
    S = k.size(0)
    group = H // k.size(1)
    heads = torch.arange(H) // group
    q32, k32, v32 = q.float().permute(1, 0, 2), k.float()[:, heads].permute(1, 2, 0), v.float()[:, heads].permute(1, 0, 2)
    scores = q32 @ k32 * (scale if scale is not None else D ** (-1 / 2))
    mask = torch.zeros(T, S)
    for i in range(T):
        mask[i, S - T + i + 1 :] = float("-inf")
        if sliding_window is not None:
            mask[i, : max(0, S - T + i + 1 - sliding_window)] = float("-inf")
    scores = scores + mask
    weights = (scores - scores.max(-1, keepdim=True).values).exp()
    weights = weights / weights.sum(-1, keepdim=True)
    return (weights @ v32).permute(1, 0, 2).to(q.dtype)
