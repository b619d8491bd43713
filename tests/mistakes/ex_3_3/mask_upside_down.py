# expect: True where a token is
import torch


def left_pad(prompts):
    width = max(map(len, prompts))
    token_ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[True] * (width - len(p)) + [False] * len(p) for p in prompts])
    positions = torch.tensor([[0] * (width - len(p)) + list(range(len(p))) for p in prompts])
    return token_ids, mask, positions
