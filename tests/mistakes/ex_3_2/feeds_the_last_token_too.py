# expect: The last token need not go in
import torch


def generate_with_cache(model, token_ids, max_new_tokens, cache):
    logits = model(torch.tensor(token_ids), torch.arange(len(token_ids)), cache)
    position, output = len(token_ids), []
    for _ in range(max_new_tokens):
        token = int(logits[-1].argmax())
        output.append(token)
        logits = model(torch.tensor([token]), torch.tensor([position]), cache)
        position += 1
    return output
