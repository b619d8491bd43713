# expect: should return exactly
import torch


def greedy_generate(model, token_ids, max_new_tokens):
    tokens = list(token_ids)
    for _ in range(1, max_new_tokens):
        tokens.append(int(model(torch.tensor(tokens))[-1].argmax()))
    return tokens[len(token_ids) :]
