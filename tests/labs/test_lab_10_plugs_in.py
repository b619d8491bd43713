"""The engine made of Lab 10's solution: drafts by the student's drafter, verified by the student's code, and the answers are
those of an engine without drafts.

minivllm's own versions of the parts are made to fail first, so that none of them can have done the work.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import minivllm.sampling.rejection
from checks.exercises.lab_10_reject import DRAWS, P_LEAST, p_value, reject_cases
from checks.exercises.lab_10_run import run_reject
from minivllm.sampling_params import SamplingParams
from minivllm.spec_decode.ngram import NgramDrafter
from tests.labs.harness import gone, solved
from tests.spec_decode.harness import GREEDY, SHAPES, Answer, knowing_drafter, make_runner, run, save_model

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.fixture
def lab_10(student: Path) -> dict[str, Any]:
    return dict(solved("10.2", "10.3", "10.4"))


@pytest.fixture
def without_minivllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gone(monkeypatch, NgramDrafter, "propose")
    gone(monkeypatch, minivllm.sampling.rejection, "verify_greedy", "rejection_sample")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def prompts_that_repeat(count: int) -> list[list[int]]:
    rng = random.Random(10)
    return [[rng.randrange(rng.choice([3, 101])) for _ in range(rng.randint(1, 20))] for _ in range(count)]


def drafted(
    model: Path, prompts: Sequence[Sequence[int]], parts: dict[str, Any], params: Any = GREEDY, **settings: Any
) -> tuple[list[Answer], Any]:
    runner = make_runner(model, parts, speculative_config=NGRAM, **settings)
    answers = run(runner, prompts, params, parts, stagger=1)
    assert runner.speculation is not None
    return answers, runner.speculation.stats


def test_the_labs_parts_are_components(lab_10: dict[str, Any]) -> None:
    assert set(lab_10) == {"drafter", "rejection_sampler"}
    for seam, part in lab_10.items():
        assert ".my_engine." in part.__module__, seam
    assert lab_10["rejection_sampler"].capabilities == {"greedy", "sampling"}


@pytest.mark.usefixtures("without_minivllms_own")
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_answers_are_those_without_drafts(lab_10: dict[str, Any], model: Path, shape: str) -> None:
    prompts = prompts_that_repeat(8)
    plain = run(make_runner(model, **SHAPES[shape]), prompts)
    answers, stats = drafted(model, prompts, lab_10, **SHAPES[shape])
    assert answers == plain
    assert stats.num_verifications > 0


@pytest.mark.usefixtures("without_minivllms_own")
def test_drafts_that_are_often_right_are_verified_by_the_labs_code(lab_10: dict[str, Any], model: Path) -> None:
    prompts = prompts_that_repeat(8)
    plain = run(make_runner(model), prompts)
    known = [[*prompt, *answer.token_ids, 1, 2, 3] for prompt, answer in zip(prompts, plain, strict=True)]
    answers, stats = drafted(model, prompts, {**lab_10, "drafter": knowing_drafter(known, 0.8)})
    assert answers == plain
    assert stats.tokens_per_step > 2


def test_the_labs_drafter_proposes_what_minivllms_does(lab_10: dict[str, Any], model: Path) -> None:
    prompts = prompts_that_repeat(12)
    theirs, own = (drafted(model, prompts, parts) for parts in ({}, {"drafter": lab_10["drafter"]}))
    assert own[0] == theirs[0]
    assert (own[1].drafted, own[1].accepted) == (theirs[1].drafted, theirs[1].accepted)


@pytest.mark.usefixtures("without_minivllms_own")
def test_sampled_answers_keep_to_what_requests_ask(lab_10: dict[str, Any], model: Path) -> None:
    prompts = prompts_that_repeat(8)
    allowed = [3, 5, 8, 13]
    params = [
        SamplingParams(
            temperature=1.0, seed=i, max_tokens=10, ignore_eos=True, allowed_token_ids=allowed, logprobs=i % 2 or None
        )
        for i in range(8)
    ]
    answers, stats = drafted(model, prompts, lab_10, params)
    again, _ = drafted(model, prompts, lab_10, params)
    assert again == answers  # a seed gives the same text again
    assert sum(stats.accepted) > 0
    for answer, asked in zip(answers, params, strict=True):
        assert len(answer.token_ids) == 10
        assert set(answer.token_ids) <= set(allowed)
        assert asked.logprobs is None or len(answer.logprobs) == 10


def test_who_has_passed_greedy_verification_alone_samples_with_minivllms(student: Path, model: Path) -> None:
    part = solved("10.3")["rejection_sampler"]
    prompts = prompts_that_repeat(6)
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=8, ignore_eos=True) for i in range(6)]
    answers, _ = drafted(model, prompts, {"rejection_sampler": part}, params)
    assert all(len(answer.token_ids) == 8 for answer in answers)


def test_sampled_first_tokens_have_the_models_distribution(lab_10: dict[str, Any], model: Path) -> None:
    """One prompt, a thousand seeds, four allowed tokens: drafts are always the first of them."""

    class Stubborn:
        capabilities = frozenset({"ngram"})

        def __init__(self, longest: int, shortest: int) -> None:
            pass

        def propose(self, token_ids: Any, k: int) -> list[int]:
            return [3] * k

    allowed, count = [3, 5, 8, 13], 1000
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=2, ignore_eos=True, allowed_token_ids=allowed) for i in range(count)
    ]
    parts = {"rejection_sampler": lab_10["rejection_sampler"], "drafter": Stubborn}
    answers, _ = drafted(model, [[7, 9, 11]] * count, parts, params)
    plain = run(make_runner(model), [[7, 9, 11]] * count, params)
    table = [torch.zeros(4, 4, dtype=torch.float64) for _ in range(2)]
    for counts, found in zip(table, (answers, plain), strict=True):
        for answer in found:
            first, second = (allowed.index(token) for token in answer.token_ids)
            counts[first, second] += 1
    pooled = (table[0] + table[1]).flatten() / (2 * count)
    for counts in table:  # neither sample is far from what the two have in common
        assert p_value(counts.flatten(), pooled) > P_LEAST


def test_an_answer_draws_as_many_requests_though_some_calls_are_slow() -> None:
    """On a busy machine a call may take ten times as long as the next."""
    sizes: list[int] = []

    def rejection_sample(draft_ids: Any, *others: Any) -> Any:
        sizes.append(len(draft_ids))
        if len(sizes) in (2, 3):
            stop = time.process_time() + 0.02
            while time.process_time() < stop:
                pass
        return torch.zeros(len(draft_ids), draft_ids.shape[1] + 1, dtype=torch.int64)

    case = next(case for case in reject_cases(0) if case["kind"] != "given")
    run_reject(SimpleNamespace(rejection_sample=rejection_sample), case)  # type: ignore[arg-type]
    assert sizes[-1] == DRAWS
