# expect: Positions count from 0
import torch


def left_pad(prompts):
    width = max(map(len, prompts))
    token_ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts])
    return token_ids, mask, mask.cumsum(1)
