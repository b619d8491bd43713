# expect: called the model
import torch


def generate_with_cache(model, token_ids, max_new_tokens, cache):
    model(torch.tensor(token_ids), torch.arange(len(token_ids)), cache)
    token, position, output = token_ids[-1], len(token_ids), []
    for _ in range(max_new_tokens):
        logits = model(torch.tensor([token]), torch.tensor([position]), cache)
        token, position = int(logits[-1].argmax()), position + 1
        output.append(token)
    return output
