# expect: the prompt counts too
import torch


def generate_with_cache(model, token_ids, max_new_tokens, cache):
    logits = model(torch.tensor(token_ids), torch.arange(len(token_ids)), cache)
    output = [int(logits[-1].argmax())]
    while len(output) < max_new_tokens:
        logits = model(torch.tensor(output[-1:]), torch.tensor([len(output)]), cache)
        output.append(int(logits[-1].argmax()))
    return output
