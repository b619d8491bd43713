# expect: Append each new token before the next call
import torch


def greedy_generate(model, token_ids, max_new_tokens):
    new = []
    for _ in range(max_new_tokens):
        new.append(int(model(torch.tensor(token_ids))[-1].argmax()))
    return new
