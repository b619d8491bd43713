# expect: number of tokens before it
import torch


def generate_with_cache(model, token_ids, max_new_tokens, cache):
    new, output = list(token_ids), []
    for _ in range(max_new_tokens):
        logits = model(torch.tensor(new), torch.arange(len(new)), cache)
        new = [int(logits[-1].argmax())]
        output += new
    return output
