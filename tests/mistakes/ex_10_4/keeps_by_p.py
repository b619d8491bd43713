# expect: always kept|divide by that
import torch
from minivllm.sampling.sampler import INVALID, choose


def rejection_sample(draft_ids, draft_probs, target_probs, noise):
    B, k = draft_ids.shape
    p_d = target_probs[:, :k].gather(-1, draft_ids[..., None])[..., 0]
    q_d = draft_probs.gather(-1, draft_ids[..., None])[..., 0]
    accepted = noise[:, :k, 0] < p_d
    n = accepted.cumprod(dim=-1).sum(dim=-1)
    rows = torch.arange(B)
    q = torch.cat([draft_probs, torch.zeros_like(target_probs[:, :1])], dim=1)
    p = target_probs[rows, n]
    residual = (p - q[rows, n]).clamp(min=0)
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, p)
    token = choose(residual.log(), noise[rows, n, 1])
    answer = torch.full((B, k + 1), INVALID, dtype=draft_ids.dtype)
    for i in range(k):
        answer[:, i] = torch.where(i < n, draft_ids[:, i], answer[:, i])
    answer[rows, n] = token
    return answer
