# expect: passed
import torch


def generate_with_cache(model, token_ids, max_new_tokens, cache):
    logits = model(torch.tensor(token_ids), torch.arange(len(token_ids)), cache)
    output = [logits[-1].argmax().item()]
    for i in range(max_new_tokens - 1):
        logits = model(torch.tensor([output[-1]]), torch.tensor([len(token_ids) + i]), cache)
        output.append(logits[0].argmax().item())
    return output
