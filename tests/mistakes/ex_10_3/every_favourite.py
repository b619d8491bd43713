# expect: answer another text
import torch


def verify_greedy(draft_ids, target_logits):
    return target_logits.argmax(dim=-1)
