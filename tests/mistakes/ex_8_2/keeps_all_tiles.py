# expect: tiles were kept. On a chip there is room for the one at hand
import torch


def online_softmax(scores, values):
    scores, values = torch.cat(list(scores)), torch.cat(list(values))
    if scores.max() == float("-inf"):
        return torch.zeros(values.shape[1])
    return scores.softmax(0) @ values
