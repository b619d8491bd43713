# expect: the whole prompt goes in at once
import torch


def generate_with_cache(model, token_ids, max_new_tokens, cache):
    position, output = 0, []
    for token in token_ids:
        logits = model(torch.tensor([token]), torch.tensor([position]), cache)
        position += 1
    while len(output) < max_new_tokens:
        output.append(int(logits[-1].argmax()))
        if len(output) < max_new_tokens:
            logits = model(torch.tensor(output[-1:]), torch.tensor([position]), cache)
            position += 1
    return output
