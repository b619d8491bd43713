# expect: was changed
import torch


def verify_greedy(draft_ids, target_logits):
    best = target_logits.argmax(dim=-1)
    n = 0
    while n < len(draft_ids) and best[n] == draft_ids[n]:
        n += 1
    if n < len(draft_ids):
        draft_ids[n] = best[n]
    return best[: n + 1]
