# expect: Token id 0 can be a real token
import torch


def left_pad(prompts):
    width = max(map(len, prompts))
    token_ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = token_ids != 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return token_ids, mask, positions
