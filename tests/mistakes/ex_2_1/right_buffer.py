# expect: passed
import torch


def greedy_generate(model, token_ids, max_new_tokens):
    buffer = torch.zeros(len(token_ids) + max_new_tokens, dtype=torch.int64)
    buffer[: len(token_ids)] = torch.tensor(token_ids)
    for end in range(len(token_ids), len(buffer)):
        buffer[end] = model(buffer[:end])[-1].argmax()
    return buffer[len(token_ids) :].tolist()
