# expect: passed
import torch


def online_softmax(scores, values):
    """Keeps the result itself, and the logarithm of the total."""
    out, log_total = None, torch.tensor(float("-inf"))
    for s, v in zip(scores, values):
        log_tile = torch.logsumexp(s, 0)
        new = torch.logaddexp(log_total, log_tile)
        if out is None:
            out = torch.zeros(v.shape[1])
        if new > float("-inf"):
            out = out * torch.exp(log_total - new) + torch.exp(s - new) @ v
        log_total = new
    return out
