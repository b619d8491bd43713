# expect: of all rows at once
import torch


def greedy_generate(model, token_ids, max_new_tokens):
    tokens = list(token_ids)
    for _ in range(max_new_tokens):
        logits = model(torch.tensor(tokens))
        tokens.append(int(logits.argmax()) % logits.shape[1])
    return tokens[len(token_ids) :]
