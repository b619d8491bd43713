# expect: passed
import torch
from minivllm.sampling.sampler import INVALID, choose


def rejection_sample(draft_ids, draft_probs, target_probs, noise):
    B, k = draft_ids.shape
    answers = torch.full((B, k + 1), INVALID)
    ids, q, p, u = draft_ids.tolist(), draft_probs.tolist(), target_probs.tolist(), noise.tolist()
    for b in range(B):
        weights = p[b][k]
        n = 0
        while n < k and u[b][n][0] * q[b][n][ids[b][n]] < p[b][n][ids[b][n]]:
            answers[b, n] = ids[b][n]
            n += 1
        if n < k:
            weights = [max(x - y, 0) for x, y in zip(p[b][n], q[b][n])]
        if sum(weights) == 0:
            weights = p[b][n]
        mark, token = u[b][n][1] * sum(weights), 0
        while token < len(weights) - 1 and mark >= weights[token]:
            mark -= weights[token]
            token += 1
        answers[b, n] = token
    return answers
