# expect: shape
import torch


def apply_temperature(logits, temperature):
    safe = torch.where(temperature < 1e-5, torch.ones_like(temperature), temperature)
    return logits / safe[:, None]


def apply_top_k(logits, k):
    return logits.topk(max(1, min(int(k.max()), logits.shape[-1])), dim=-1).values
