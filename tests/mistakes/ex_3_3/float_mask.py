# expect: mask is float32, and should be bool
import torch


def left_pad(prompts):
    width = max(map(len, prompts))
    token_ids, mask = torch.zeros(len(prompts), width, dtype=torch.int64), torch.zeros(len(prompts), width)
    positions = torch.zeros_like(token_ids)
    for row, p in enumerate(prompts):
        token_ids[row, width - len(p):] = torch.tensor(p)
        mask[row, width - len(p):] = 1
        positions[row, width - len(p):] = torch.arange(len(p))
    return token_ids, mask, positions
