# expect: It is filled up behind the tokens that count.
import torch


def verify_greedy(draft_ids, target_logits):
    best = target_logits.argmax(dim=-1)
    is_right = best[:-1] == draft_ids
    n = int(is_right.cumprod(dim=0).sum())
    answer = torch.full_like(best, -1)
    answer[: n + 1] = best[: n + 1]
    return answer
