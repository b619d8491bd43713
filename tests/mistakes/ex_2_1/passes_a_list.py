# expect: takes a 1-D tensor of int64 token ids, and was given a list
import torch


def greedy_generate(model, token_ids, max_new_tokens):
    tokens = list(token_ids)
    for _ in range(max_new_tokens):
        tokens.append(int(model(tokens)[-1].argmax()))
    return tokens[len(token_ids) :]
