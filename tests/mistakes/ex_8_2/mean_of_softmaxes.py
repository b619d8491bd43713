# expect: the mean of the tiles' own softmaxes
import torch


def online_softmax(scores, values):
    parts = [s.softmax(0) @ v for s, v in zip(scores, values)]
    return torch.stack(parts).mean(0)
