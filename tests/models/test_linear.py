"""Linear: packed projections with named slices."""

from __future__ import annotations

import torch

from minivllm.models.linear import Linear


def test_slices_are_views_in_order_of_the_output() -> None:
    linear = Linear(2, {"q": 2, "k": 1}, bias=True)
    for i, (_, tensor) in enumerate(linear.named_slices()):
        tensor.fill_(i)
    assert [name for name, _ in linear.named_slices()] == ["q.weight", "q.bias", "k.weight", "k.bias"]
    assert linear.weight.tolist() == [[0, 0], [0, 0], [2, 2]]
    assert linear.bias is not None and linear.bias.tolist() == [1, 1, 3]


def test_one_product_gives_every_slice_s_own() -> None:
    linear = Linear(8, {"gate": 3, "up": 5})
    linear.weight.normal_(generator=torch.Generator().manual_seed(0))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    parts = [x @ weight.T for _, weight in linear.named_slices()]
    torch.testing.assert_close(linear(x), torch.cat(parts, dim=-1))
