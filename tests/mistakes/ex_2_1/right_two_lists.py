# expect: passed
import torch


def greedy_generate(model, token_ids, max_new_tokens):
    new = []
    while len(new) < max_new_tokens:
        logits = model(torch.tensor([*token_ids, *new], dtype=torch.long))
        new.append(torch.argmax(logits[len(logits) - 1]).item())
    return new
