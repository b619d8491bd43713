# expect: passed
import torch
from torch.nn.utils.rnn import pad_sequence


def left_pad(prompts):
    flipped = [torch.tensor(p).flip(0) for p in prompts]
    token_ids = pad_sequence(flipped, batch_first=True).flip(1)
    lengths = torch.tensor([len(p) for p in prompts])
    columns = torch.arange(token_ids.shape[1])
    mask = columns >= token_ids.shape[1] - lengths[:, None]
    return token_ids, mask, mask.long().cumsum(1) - 1
