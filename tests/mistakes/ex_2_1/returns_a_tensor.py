# expect: .tolist() makes a list
import torch


def greedy_generate(model, token_ids, max_new_tokens):
    tokens = list(token_ids)
    for _ in range(max_new_tokens):
        tokens.append(model(torch.tensor(tokens))[-1].topk(1).indices[0])
    return torch.tensor(tokens[len(token_ids) :], dtype=torch.int64)
