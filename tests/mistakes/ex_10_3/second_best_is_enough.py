# expect: Near is not enough
import torch


def verify_greedy(draft_ids, target_logits):
    two = target_logits.topk(2, dim=-1).indices
    n = 0
    while n < len(draft_ids) and draft_ids[n] in two[n]:
        n += 1
    return torch.cat([draft_ids[:n], two[n, :1]])
