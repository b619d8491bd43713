# expect: passed
import torch


def verify_greedy(draft_ids, target_logits):
    answer = []
    for i, row in enumerate(target_logits):
        answer.append(int(row.argmax()))
        if i == len(draft_ids) or answer[-1] != draft_ids[i]:
            break
    return torch.tensor(answer)
