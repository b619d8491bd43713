# expect: int(...) makes one of each
import torch


def generate_with_cache(model, token_ids, max_new_tokens, cache):
    new = torch.tensor(token_ids)
    positions = torch.arange(len(new))
    output = []
    while True:
        new = model(new, positions, cache)[-1:].argmax(-1)
        positions = positions[-1:] + 1
        output.append(new[0])
        if len(output) == max_new_tokens:
            return output
