# expect: out of range
import torch


def apply_temperature(logits, temperature):
    safe = torch.where(temperature < 1e-5, torch.ones_like(temperature), temperature)
    return logits / safe[:, None]


def apply_top_k(logits, k):
    rows = []
    for row, n in zip(logits, k.tolist()):
        rows.append(row.masked_fill(row < row.kthvalue(len(row) - n + 1).values, float("-inf")))
    return torch.stack(rows)
