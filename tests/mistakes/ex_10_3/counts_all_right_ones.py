# expect: Nothing after the first wrong draft counts
import torch


def verify_greedy(draft_ids, target_logits):
    best = target_logits.argmax(dim=-1)
    num_accepted = int((best[:-1] == draft_ids).sum())
    return best[: num_accepted + 1]
