# expect: passed
import torch


def generate_with_cache(model, token_ids, max_new_tokens, cache):
    new, output = torch.tensor(token_ids), []
    while len(output) < max_new_tokens:
        held = cache.lengths[0]
        logits = model(new, torch.arange(held, held + len(new)), cache)
        new = logits[-1:].argmax(-1)
        output.append(new.item())
    return output
