# expect: passed
import torch


def greedy_generate(model, token_ids, max_new_tokens):
    if max_new_tokens == 0:
        return []
    row = model(torch.tensor(token_ids))[-1].tolist()
    best = row.index(max(row))
    return [best] + greedy_generate(model, token_ids + [best], max_new_tokens - 1)
