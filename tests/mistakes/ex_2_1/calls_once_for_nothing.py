# expect: No call is needed at all
import torch


def greedy_generate(model, token_ids, max_new_tokens):
    tokens = list(token_ids)
    while True:
        tokens.append(int(model(torch.tensor(tokens))[-1].argmax()))
        if len(tokens) >= len(token_ids) + max_new_tokens:
            return tokens[len(token_ids) : len(token_ids) + max_new_tokens]
