# expect: The target's own token is missing
import torch


def verify_greedy(draft_ids, target_logits):
    best = target_logits.argmax(dim=-1)
    is_right = best[:-1] == draft_ids
    return draft_ids[: int(is_right.cumprod(dim=0).sum())]
