# expect: have changed places
import torch


def left_pad(prompts):
    width = max(map(len, prompts))
    token_ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts])
    return token_ids, (mask.cumsum(-1) - 1).clamp(min=0), mask
