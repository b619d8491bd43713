# expect: passed
import torch


def apply_temperature(logits, temperature):
    safe = torch.where(temperature < 1e-5, torch.ones_like(temperature), temperature)
    return logits / safe[:, None]


class Off(Exception):
    pass


def threshold(row: torch.Tensor, k: int) -> torch.Tensor:
    if k <= 0 or k >= row.numel():
        raise Off
    return torch.kthvalue(row, row.numel() - k + 1).values


def apply_top_k(logits, k):
    rows = []
    for row, n in zip(logits.unbind(0), k):
        try:
            rows.append(torch.where(row >= threshold(row, int(n)), row, torch.tensor(float("-inf"))))
        except Off:
            rows.append(row.clone())
    return torch.stack(rows)
