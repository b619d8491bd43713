"""Verification: greedy answers, and distributions that are the target's whatever the drafts are.

The statistical tests draw 200,000 times from 5 tokens. A right sampler fails one with probability below 1e-6; a planted bias of
2 % of probability is caught.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from minivllm.sampling.rejection import RejectionSampler, is_answer, rejection_sample, verify_greedy
from minivllm.sampling.sampler import INVALID, Sampler, SamplingMetadata, choose, uniform

DRAWS = 200_000
V = 5
P = torch.tensor([0.35, 0.05, 0.2, 0.3, 0.1], dtype=torch.float64)
Q = {
    "one-hot, likely": torch.eye(V, dtype=torch.float64)[0],
    "one-hot, unlikely": torch.eye(V, dtype=torch.float64)[1],
    "general": torch.tensor([0.1, 0.4, 0.2, 0.0, 0.3], dtype=torch.float64),
    "the target": P,
    "without overlap where p is small": torch.tensor([0.0, 0.5, 0.0, 0.0, 0.5], dtype=torch.float64),
}
FILTERS = {"none": {}, "top_k": {"top_k": torch.tensor([3])}, "top_p": {"top_p": torch.tensor([0.6])}}


def chi_square_p_value(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Pearson's test, by Wilson and Hilferty's approximation of its tail. A token that cannot be must not be."""
    assert counts[probs == 0].sum() == 0
    expected = probs[probs > 0] * counts.sum()
    statistic = float(((counts[probs > 0] - expected) ** 2 / expected).sum())
    df = len(expected) - 1
    z = ((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
    return 0.5 * math.erfc(z / math.sqrt(2))


def noise(num_rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(DRAWS, num_rows, 2, generator=generator, dtype=torch.float64)


def filtered(p: torch.Tensor, name: str) -> torch.Tensor:
    zeros = torch.zeros(1, dtype=torch.int64)
    settings = SamplingMetadata(torch.ones(1), zeros, zeros, zeros, **FILTERS[name])
    return Sampler().probs(p.log()[None].float(), settings)[0].double()


def first_tokens(p: torch.Tensor, q: torch.Tensor, seed: int) -> torch.Tensor:
    """How often each token is the first of an answer to one draft drawn from q."""
    generator = torch.Generator().manual_seed(seed + 1000)
    drafts = torch.multinomial(q, DRAWS, replacement=True, generator=generator)[:, None]
    target = p.expand(DRAWS, 2, V)
    answers = rejection_sample(drafts, q.expand(DRAWS, 1, V), target, noise(2, seed))
    return torch.bincount(answers[:, 0], minlength=V)


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("name", Q)
def test_the_first_token_has_the_targets_distribution(name: str, filters: str) -> None:
    p = filtered(P, filters)
    assert chi_square_p_value(first_tokens(p, Q[name], seed=len(name)), p) > 1e-6


def test_two_drafts_and_the_bonus_token_have_the_targets_joint_distribution() -> None:
    """The target's rows depend on the tokens before them, as a model's do."""
    generator = torch.Generator().manual_seed(5)
    table = torch.rand(V, V, generator=generator, dtype=torch.float64) + 0.05
    table /= table.sum(dim=-1, keepdim=True)  # p(next | token before)
    q = torch.tensor([0.3, 0.3, 0.1, 0.2, 0.1], dtype=torch.float64)
    drafts = torch.multinomial(q.expand(DRAWS, V), 2, replacement=True, generator=generator)
    target = torch.stack([P.expand(DRAWS, V), table[drafts[:, 0]], table[drafts[:, 1]]], dim=1)
    answers = rejection_sample(drafts, q.expand(DRAWS, 2, V), target, noise(3, 6))
    assert chi_square_p_value(torch.bincount(answers[:, 0], minlength=V), P) > 1e-6
    for before in range(V):
        second = answers[(answers[:, 0] == before) & (answers[:, 1] != INVALID)]
        assert chi_square_p_value(torch.bincount(second[:, 1], minlength=V), table[before]) > 1e-6
        third = answers[(answers[:, 1] == before) & (answers[:, 2] != INVALID)]
        assert chi_square_p_value(torch.bincount(third[:, 2], minlength=V), table[before]) > 1e-6


@pytest.mark.parametrize("draft", range(V))
def test_coupling_has_the_targets_distribution_and_rejections_rate(draft: int) -> None:
    """The engine's way: sample, and keep the draft if it is what was sampled."""
    seeds, positions = torch.arange(DRAWS), torch.full((DRAWS,), 7)
    sampled = choose(P.log().expand(DRAWS, V), uniform(seeds, positions))
    assert chi_square_p_value(torch.bincount(sampled, minlength=V), P) > 1e-6
    answers = rejection_sample(
        torch.full((DRAWS, 1), draft), torch.eye(V)[draft].expand(DRAWS, 1, V), P.expand(DRAWS, 2, V), noise(2, draft)
    )
    kept, coupled = (answers[:, 1] != INVALID).double().mean(), (sampled == draft).double().mean()
    assert abs(kept - P[draft]) < 5 * math.sqrt(0.25 / DRAWS)
    assert abs(coupled - P[draft]) < 5 * math.sqrt(0.25 / DRAWS)


def test_a_bias_of_two_percent_is_caught() -> None:
    """Accepting a little too readily is the mistake one makes: q (1 + 2 %) passes for q."""
    p = P.clone()
    p[0] -= 0.02
    p[1] += 0.02
    assert chi_square_p_value(first_tokens(p, Q["general"], seed=1), P) < 1e-6


def test_plausible_wrong_samplers_are_caught() -> None:
    q = Q["general"]
    generator = torch.Generator().manual_seed(9)
    drafts = torch.multinomial(q, DRAWS, replacement=True, generator=generator)
    u = noise(2, 3)
    accepted = u[:, 0, 0] * q[drafts] < P[drafts]
    from_p = choose(P.log().expand(DRAWS, V), u[:, 0, 1])  # a refused draft replaced by p's token, not the residual's
    assert chi_square_p_value(torch.bincount(torch.where(accepted, drafts, from_p), minlength=V), P) < 1e-6
    residual = (P - q).clamp(min=0)
    from_residual = choose((residual / residual.sum()).log().expand(DRAWS, V), u[:, 0, 1])
    too_eager = u[:, 0, 0] * q[drafts] < P[drafts] + 0.02 * q[drafts]  # accepts with 2 % more probability
    biased = torch.where(too_eager, drafts, from_residual)
    assert chi_square_p_value(torch.bincount(biased, minlength=V), P) < 1e-6


# ---------------------------------------------------------------- shapes and edges


@pytest.mark.parametrize(
    ("drafts", "best", "answer"),
    [
        ([3, 1], [3, 1, 4], [3, 1, 4]),  # all right, and the bonus token
        ([3, 1], [3, 2, 4], [3, 2]),
        ([3, 1], [0, 1, 4], [0]),  # the second agrees, but after a wrong first
        ([], [2], [2]),
    ],
)
def test_greedy_verification(drafts: list[int], best: list[int], answer: list[int]) -> None:
    logits = torch.nn.functional.one_hot(torch.tensor(best), V).float()
    assert verify_greedy(torch.tensor(drafts, dtype=torch.int64), logits).tolist() == answer


def test_an_answer_ends_with_the_first_token_that_is_not_the_draft() -> None:
    #                     request 1: 7 right, 9 wrong    2: no drafts   3: both right
    token_ids = np.array([7, 5, 4, 3, 8, 6, 1])
    draft_ids = np.array([7, 9, -2, -2, 8, 6, -2])
    ahead = np.array([0, 1, 2, 0, 0, 1, 2])
    assert is_answer(token_ids, draft_ids, ahead).tolist() == [True, True, False, True, True, True, True]


def test_a_draft_the_target_cannot_say_is_never_accepted() -> None:
    p = torch.tensor([0.0, 1.0])
    answers = rejection_sample(
        torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[[1.0, 0.0]]]), p.expand(1, 2, 2), torch.zeros(1, 2, 2)
    )
    assert answers.tolist() == [[1, INVALID]]


def test_a_draft_the_target_is_sure_of_is_always_accepted() -> None:
    p = torch.tensor([1.0, 0.0])
    nearly_one = torch.full((1, 2, 2), 1 - 2.0**-53, dtype=torch.float64)
    answers = rejection_sample(torch.zeros(1, 1, dtype=torch.int64), p.expand(1, 1, 2), p.expand(1, 2, 2), nearly_one)
    assert answers.tolist() == [[0, 0]]


# ---------------------------------------------------------------- a batch, request by request


def metadata(num_rows: int, temperature: float, **settings: torch.Tensor) -> SamplingMetadata:
    rows = torch.arange(num_rows)
    sampled = rows if temperature else rows[:0]
    return SamplingMetadata(torch.full((num_rows,), temperature), rows // 2, rows % 2 + 3, sampled, **settings)


@pytest.mark.parametrize("filters", FILTERS)
def test_a_batch_verified_by_rejection_has_the_targets_distribution(filters: str) -> None:
    num_requests, p = 6000, filtered(P, filters)
    settings = {name: value.expand(2 * num_requests) for name, value in FILTERS[filters].items()}
    draft_ids = np.tile([3, -2], num_requests)
    ahead = np.tile([0, 1], num_requests)
    logits = P.log().float().expand(2 * num_requests, V)
    output = RejectionSampler()(logits, metadata(2 * num_requests, 1.0, **settings), Sampler(), draft_ids, ahead)
    answers = output.token_ids.view(num_requests, 2)
    assert chi_square_p_value(torch.bincount(answers[:, 0], minlength=V), p) > 1e-6
    accepted = answers[:, 0] == 3
    assert (answers[~accepted, 1] == INVALID).all()
    assert chi_square_p_value(torch.bincount(answers[accepted, 1], minlength=V), p) > 1e-6


def test_greedy_sampled_and_draftless_requests_share_a_batch() -> None:
    best = torch.tensor([4, 2, 0, 1, 1, 3])
    logits = torch.nn.functional.one_hot(best, V).float() * 50  # so sure that draws are argmaxes
    draft_ids, ahead = np.array([4, -2, -2, 1, 2, -2]), np.array([0, 1, 0, 0, 1, 2])
    settings = metadata(6, 0.0)
    settings.sampled_rows = torch.tensor([3, 4, 5])
    settings.temperature = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    output = RejectionSampler()(logits, settings, Sampler(), draft_ids, ahead)
    assert output.token_ids.tolist() == [4, 2, 0, 1, 1, INVALID]


def test_a_row_of_nan_stays_invalid() -> None:
    logits = torch.full((2, V), float("nan"))
    output = RejectionSampler()(logits, metadata(2, 1.0), Sampler(), np.array([1, -2]), np.array([0, 1]))
    assert output.token_ids.tolist() == [INVALID, INVALID]
