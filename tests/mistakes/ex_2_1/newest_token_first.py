# expect: prompt first, then the new tokens in order
import torch


def greedy_generate(model, token_ids, max_new_tokens):
    tokens = list(token_ids)
    new = []
    for _ in range(max_new_tokens):
        new.append(int(model(torch.tensor(tokens))[-1].argmax()))
        tokens.insert(0, new[-1])
    return new
