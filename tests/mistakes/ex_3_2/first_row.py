# expect: logits[-1]
import torch


def generate_with_cache(model, token_ids, max_new_tokens, cache):
    new, start, output = list(token_ids), 0, []
    for _ in range(max_new_tokens):
        logits = model(torch.tensor(new), torch.arange(start, start + len(new)), cache)
        start += len(new)
        new = [int(logits[0].argmax())]
        output += new
    return output
