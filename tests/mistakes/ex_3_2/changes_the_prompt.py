# expect: caller's list was changed
import torch


def generate_with_cache(model, token_ids, max_new_tokens, cache):
    start, output, new = 0, token_ids, list(token_ids)
    n = len(token_ids)
    for _ in range(max_new_tokens):
        logits = model(torch.tensor(new), torch.arange(start, start + len(new)), cache)
        start += len(new)
        new = [int(logits[-1].argmax())]
        output += new
    return output[n:]
