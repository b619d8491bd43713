# expect: smallest logit of the last row (argmin)
import torch


def greedy_generate(model, token_ids, max_new_tokens):
    tokens = list(token_ids)
    for _ in range(max_new_tokens):
        tokens.append(int(model(torch.tensor(tokens))[-1].argmin()))
    return tokens[len(token_ids) :]
