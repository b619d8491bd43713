# expect: The last call's logits are not used
import torch


def greedy_generate(model, token_ids, max_new_tokens):
    tokens = list(token_ids)
    logits = model(torch.tensor(tokens))
    for _ in range(max_new_tokens):
        tokens.append(int(logits[-1].argmax()))
        logits = model(torch.tensor(tokens))
    return tokens[len(token_ids) :]
