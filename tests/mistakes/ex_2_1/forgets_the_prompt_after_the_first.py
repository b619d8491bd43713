# expect: tokens are missing
import torch


def greedy_generate(model, token_ids, max_new_tokens):
    new = []
    for _ in range(max_new_tokens):
        seen = token_ids if not new else token_ids[-1:] + new
        new.append(int(model(torch.tensor(seen))[-1].argmax()))
    return new
