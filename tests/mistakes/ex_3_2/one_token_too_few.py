# expect: It should return exactly 1
import torch


def generate_with_cache(model, token_ids, max_new_tokens, cache):
    logits = model(torch.tensor(token_ids), torch.arange(len(token_ids)), cache)
    output = []
    for i in range(max_new_tokens - 1):
        output.append(int(logits[-1].argmax()))
        logits = model(torch.tensor(output[-1:]), torch.tensor([len(token_ids) + i]), cache)
    return output
