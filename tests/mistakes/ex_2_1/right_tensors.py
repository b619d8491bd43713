# expect: passed
import torch


def greedy_generate(model, token_ids, max_new_tokens):
    sequence = torch.tensor(token_ids)
    for _ in range(max_new_tokens):
        newest = model(sequence)[-1].argmax(dim=-1, keepdim=True)
        sequence = torch.cat([sequence, newest])
    return sequence[len(token_ids) :].tolist()
