# expect: returned the prompt as well
import torch


def greedy_generate(model, token_ids, max_new_tokens):
    tokens = list(token_ids)
    for _ in range(max_new_tokens):
        tokens.append(int(model(torch.tensor(tokens))[-1].argmax()))
    return tokens
