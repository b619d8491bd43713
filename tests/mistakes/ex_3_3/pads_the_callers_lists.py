# expect: caller's lists were changed
import torch


def left_pad(prompts):
    lengths, width = [len(p) for p in prompts], max(map(len, prompts))
    for p in prompts:
        while len(p) < width:
            p.insert(0, 0)
    token_ids = torch.tensor(prompts)
    mask = torch.tensor([[False] * (width - n) + [True] * n for n in lengths])
    return token_ids, mask, (mask.cumsum(1) - 1).clamp(min=0)
