# expect: Work on a copy
import torch


def greedy_generate(model, token_ids, max_new_tokens):
    new = []
    for _ in range(max_new_tokens):
        new.append(int(model(torch.tensor(token_ids))[-1].argmax()))
        token_ids.append(new[-1])
    return new
