# expect: passed
import torch


def verify_greedy(draft_ids, target_logits):
    best = target_logits.topk(1, dim=-1).indices.squeeze(-1)
    n = 0
    for draft, token in zip(draft_ids.tolist(), best.tolist()):
        if draft != token:
            break
        n += 1
    return torch.cat([draft_ids[:n], best[n : n + 1]])
