# expect: compared with draft i|row i is what|own token is missing
import torch


def verify_greedy(draft_ids, target_logits):
    best = target_logits.argmax(dim=-1)
    is_right = best[1:] == draft_ids
    n = int(is_right.cumprod(dim=0).sum())
    return torch.cat([draft_ids[:n], best[n : n + 1]])
