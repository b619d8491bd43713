# expect: should return
import torch


def verify_greedy(draft_ids, target_logits):
    best = target_logits.argmin(dim=-1)
    is_right = best[:-1] == draft_ids
    return best[: int(is_right.cumprod(dim=0).sum()) + 1]
