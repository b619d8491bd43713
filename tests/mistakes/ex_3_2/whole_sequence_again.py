# expect: only the newest token is new
import torch


def generate_with_cache(model, token_ids, max_new_tokens, cache):
    tokens = list(token_ids)
    for _ in range(max_new_tokens):
        logits = model(torch.tensor(tokens), torch.arange(len(tokens)), cache)
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(token_ids):]
