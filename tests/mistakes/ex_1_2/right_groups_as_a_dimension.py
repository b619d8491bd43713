# expect: passed
import torch


def causal_attention(q, k, v, *, scale=None, sliding_window=None):
    T, H, D = q.shape
    S, Hkv, _ = k.shape
    if scale is None:
        scale = D**-0.5
    grouped = q.double().view(T, Hkv, H // Hkv, D) * scale
    scores = torch.einsum("tgjd,sgd->gjts", grouped, k.double())
    distance = torch.arange(S - T, S)[:, None] - torch.arange(S)
    visible = (distance >= 0) & (distance < (sliding_window or S))
    scores = torch.where(visible, scores, torch.finfo(torch.float64).min)
    return torch.einsum("gjts,sgd->tgjd", scores.softmax(-1), v.double()).reshape(T, H, D).to(q.dtype)
