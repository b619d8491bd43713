# expect: Nothing after the first wrong draft counts
import torch


def verify_greedy(draft_ids, target_logits):
    best = target_logits.argmax(dim=-1)
    is_right = best[:-1] == draft_ids
    return torch.cat([draft_ids[is_right], best[int(is_right.sum()) :][:1]])
