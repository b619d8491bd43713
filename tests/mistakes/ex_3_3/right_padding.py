# expect: last column
import torch


def left_pad(prompts):
    width = max(map(len, prompts))
    token_ids = torch.tensor([p + [0] * (width - len(p)) for p in prompts])
    mask = torch.tensor([[True] * len(p) + [False] * (width - len(p)) for p in prompts])
    positions = torch.arange(width).expand(len(prompts), width)
    return token_ids, mask, positions
