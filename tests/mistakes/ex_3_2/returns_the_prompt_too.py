# expect: returned the prompt as well
import torch


def generate_with_cache(model, token_ids, max_new_tokens, cache):
    tokens, start, new = list(token_ids), 0, list(token_ids)
    for _ in range(max_new_tokens):
        logits = model(torch.tensor(new), torch.arange(start, start + len(new)), cache)
        start += len(new)
        new = [int(logits[-1].argmax())]
        tokens += new
    return tokens
