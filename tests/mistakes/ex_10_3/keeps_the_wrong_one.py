# expect: in its place stands what the target says
import torch


def verify_greedy(draft_ids, target_logits):
    best = target_logits.argmax(dim=-1)
    is_right = best[:-1] == draft_ids
    n = int(is_right.cumprod(dim=0).sum())
    return torch.cat([draft_ids[: n + 1], best[-1:]]) if n == len(draft_ids) else draft_ids[: n + 1]
