# expect: position 0
import torch


def left_pad(prompts):
    width = max(map(len, prompts))
    token_ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts])
    positions = torch.arange(width).repeat(len(prompts), 1)
    return token_ids, mask, positions
