# expect: only the newest token
import torch


def greedy_generate(model, token_ids, max_new_tokens):
    tokens = list(token_ids)
    for i in range(max_new_tokens):
        seen = tokens if i == 0 else tokens[-1:]
        tokens.append(int(model(torch.tensor(seen))[-1].argmax()))
    return tokens[len(token_ids) :]
