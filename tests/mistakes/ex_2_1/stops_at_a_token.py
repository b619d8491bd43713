# expect: end tokens come later
import torch


def greedy_generate(model, token_ids, max_new_tokens):
    tokens = list(token_ids)
    for _ in range(max_new_tokens):
        token = int(model(torch.tensor(tokens))[-1].argmax())
        tokens.append(token)
        if token in (0, 1, 2):
            break
    return tokens[len(token_ids) :]
