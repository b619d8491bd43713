# expect: The target's own token|as they came|in its place stands
import torch


def verify_greedy(draft_ids, target_logits):
    return draft_ids
