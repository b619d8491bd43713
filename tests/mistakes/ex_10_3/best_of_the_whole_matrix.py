# expect: compared with draft i|row i is what|should return
import torch


def verify_greedy(draft_ids, target_logits):
    best = target_logits.argmax() % target_logits.shape[-1]
    n = 0
    while n < len(draft_ids) and best == draft_ids[n]:
        n += 1
    return torch.cat([draft_ids[:n], best.reshape(1)])
