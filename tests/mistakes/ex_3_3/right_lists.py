# expect: passed
import torch


def left_pad(prompts):
    width = max(map(len, prompts))
    pads = [width - len(p) for p in prompts]
    token_ids = torch.tensor([[0] * n + list(p) for n, p in zip(pads, prompts)])
    mask = torch.tensor([[False] * n + [True] * len(p) for n, p in zip(pads, prompts)])
    positions = torch.tensor([[0] * n + list(range(len(p))) for n, p in zip(pads, prompts)])
    return token_ids, mask, positions
