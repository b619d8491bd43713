# expect: passed
import torch


def verify_greedy(draft_ids, target_logits):
    best = target_logits.argmax(dim=-1)
    wrong = (best[:-1] != draft_ids).nonzero().flatten()
    n = int(wrong[0]) if len(wrong) else len(draft_ids)
    return best[: n + 1]
