# expect: RuntimeError
import torch


def apply_temperature(logits, temperature):
    safe = torch.where(temperature < 1e-5, torch.ones_like(temperature), temperature)
    return logits / safe[:, None]


def apply_top_k(logits, k):
    rows = []
    for row, n in zip(logits, k.tolist()):
        if n <= 0:
            rows.append(row)
        else:
            rows.append(row.masked_fill(row < row.topk(n).values[-1], float("-inf")))
    return torch.stack(rows)
