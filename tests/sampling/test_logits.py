"""The filters of sampling/logits.py, by hand-sized examples."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from minivllm.sampling.logits import apply_min_p, apply_temperature, apply_top_k, apply_top_p, mask_tokens

INF = float("inf")


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def kept(logits: torch.Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero()[:, 0].tolist() for row in logits]


def log(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


# ---------------------------------------------------------------- temperature


def test_temperature_divides_each_row_by_its_own() -> None:
    out = apply_temperature(rows([1, 2], [1, 2]), torch.tensor([0.5, 2.0]))
    assert out.tolist() == [[2, 4], [0.5, 1]]


def test_temperature_zero_leaves_the_row_to_the_argmax() -> None:
    out = apply_temperature(rows([1, 2, -INF], [4, 2, 0]), torch.tensor([0.0, 2.0]))
    assert out.tolist() == [[1, 2, -INF], [2, 1, 0]]


# ---------------------------------------------------------------- top_k


def test_top_k_keeps_each_rows_own_k() -> None:
    logits = rows([4, 1, 3, 2], [4, 1, 3, 2], [4, 1, 3, 2])
    assert kept(apply_top_k(logits, torch.tensor([1, 2, 3]))) == [[0], [0, 2], [0, 2, 3]]


@pytest.mark.parametrize("k", [0, -1, 4, 9])
def test_top_k_is_off_at_zero_below_and_from_the_vocabulary_up(k: int) -> None:
    logits = rows([4, 1, 3, 2], [1, 1, 1, 0])
    out = apply_top_k(logits, torch.tensor([k, 1]))
    assert torch.equal(out[0], logits[0])
    assert kept(out)[1] == [0, 1, 2]


def test_top_k_keeps_what_ties_with_the_kth() -> None:
    assert kept(apply_top_k(rows([2, 5, 2, 1, 2]), torch.tensor([2]))) == [[0, 1, 2, 4]]


def test_top_k_of_fewer_candidates_than_k_keeps_them_and_makes_no_nan() -> None:
    out = apply_top_k(rows([1, -INF, 2, -INF], [-INF, -INF, -INF, -INF]), torch.tensor([3, 3]))
    assert kept(out) == [[0, 2], []]
    assert not out.isnan().any()


# ---------------------------------------------------------------- top_p


@pytest.mark.parametrize(
    ("p", "expected"), [(0.6, [2, 3]), (0.39, [3]), (1e-6, [3]), (0.69, [2, 3]), (0.75, [1, 2, 3]), (0.95, [0, 1, 2, 3])]
)
def test_top_p_keeps_the_token_that_crosses_the_line(p: float, expected: list[int]) -> None:
    assert kept(apply_top_p(rows(log(0.1, 0.2, 0.3, 0.4)), torch.tensor([p]))) == [expected]


def test_top_p_of_one_leaves_the_row_as_it_was() -> None:
    logits = rows([0, 100, -100, -INF], log(0.1, 0.2, 0.3, 0.4))
    out = apply_top_p(logits, torch.tensor([1.0, 0.6]))
    assert torch.equal(out[0], logits[0])
    assert kept(out)[1] == [2, 3]


def test_top_p_takes_the_lower_token_id_of_equal_logits() -> None:
    assert kept(apply_top_p(rows([7, 7, 7, 7]), torch.tensor([0.5]))) == [[0, 1]]


def test_top_p_among_removed_tokens_makes_no_nan() -> None:
    out = apply_top_p(rows([-INF, 1, -INF, 0]), torch.tensor([0.9]))
    assert kept(out) == [[1, 3]]
    assert not out.isnan().any()


# ---------------------------------------------------------------- min_p, masks


def test_min_p_is_relative_to_the_most_probable() -> None:
    logits = rows(log(0.1, 0.2, 0.3, 0.4))
    assert kept(apply_min_p(logits, torch.tensor([0.6]))) == [[2, 3]]
    assert kept(apply_min_p(logits, torch.tensor([1.0]))) == [[3]]


def test_min_p_of_zero_is_off() -> None:
    logits = rows([0, -1e30, -INF, 3])
    assert torch.equal(apply_min_p(logits, torch.tensor([0.0])), logits)


def test_mask_removes_a_token_from_its_row_alone() -> None:
    out = mask_tokens(torch.zeros(2, 3), torch.tensor([1, 1]), torch.tensor([0, 2]))
    assert out.tolist() == [[0, 0, 0], [-INF, 0, -INF]]


# ---------------------------------------------------------------- all


@pytest.mark.parametrize(
    ("function", "setting"),
    [
        (apply_temperature, torch.tensor([0.5])),
        (apply_top_k, torch.tensor([2])),
        (apply_top_p, torch.tensor([0.5])),
        (apply_min_p, torch.tensor([0.5])),
        (lambda logits, token: mask_tokens(logits, torch.tensor([0]), token), torch.tensor([1])),
    ],
)
def test_filters_change_neither_input_nor_surviving_values(function: Callable, setting: torch.Tensor) -> None:
    logits = rows([3, 1, 2, 0])
    out = function(logits, setting)
    assert logits.tolist() == [[3, 1, 2, 0]]
    if function is not apply_temperature:
        assert torch.equal(out[out.isfinite()], logits[out.isfinite()])


def test_filters_agree_with_transformers() -> None:
    warpers = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(8, 500, generator=torch.Generator().manual_seed(0)) * 3
    ones = torch.ones(8)
    for ours, theirs in (
        (apply_temperature(logits, 0.7 * ones), warpers.TemperatureLogitsWarper(0.7)),
        (apply_top_k(logits, (50 * ones).long()), warpers.TopKLogitsWarper(50)),
        (apply_top_p(logits, 0.9 * ones), warpers.TopPLogitsWarper(0.9)),
        (apply_min_p(logits, 0.1 * ones), warpers.MinPLogitsWarper(0.1)),
    ):
        torch.testing.assert_close(ours, theirs(None, logits))
