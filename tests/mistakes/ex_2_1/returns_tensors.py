# expect: int(...) makes one of each
import torch


def greedy_generate(model, token_ids, max_new_tokens):
    tokens = list(token_ids)
    for _ in range(max_new_tokens):
        tokens.append(model(torch.tensor(tokens))[-1].argmax())
    return tokens[len(token_ids) :]
