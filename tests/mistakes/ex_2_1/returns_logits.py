# expect: list of token ids (integers)
import torch


def greedy_generate(model, token_ids, max_new_tokens):
    tokens = list(token_ids)
    rows = []
    for _ in range(max_new_tokens):
        rows.append(model(torch.tensor(tokens))[-1])
        tokens.append(int(rows[-1].argmax()))
    return rows
