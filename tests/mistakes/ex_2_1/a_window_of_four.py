# expect: tokens are missing
import torch


def greedy_generate(model, token_ids, max_new_tokens):
    tokens = list(token_ids)
    for _ in range(max_new_tokens):
        tokens.append(int(model(torch.tensor(tokens[-4:]))[-1].argmax()))
    return tokens[len(token_ids) :]
