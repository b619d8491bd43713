"""With and without drafts, right or wrong, a request gets the same tokens: greedy, and sampled with any settings."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from minivllm.core.step import FinishReason
from minivllm.sampling.rejection import RejectionSampler
from minivllm.sampling_params import SamplingParams
from tests.spec_decode.harness import GREEDY, SHAPES, Answer, knowing_drafter, make_runner, many_prompts, run, save_model

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.6},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
    "logit_bias": {"temperature": 1.0, "logit_bias": {5: 4.0, 17: 3.0, 40: -100.0}},
    "allowed_token_ids": {"temperature": 1.0, "allowed_token_ids": [3, 5, 8, 13, 21, 34]},
    "min_tokens": {"temperature": 1.0, "min_tokens": 7, "stop_token_ids": list(range(60))},
    "stop tokens": {"temperature": 1.0, "stop_token_ids": list(range(0, 101, 7))},
    "logprobs": {"temperature": 0.9, "logprobs": 3},
    "few tokens": {"temperature": 1.0, "max_tokens": 3},
}


def sequences_of(prompts: list[list[int]], answers: list[Answer]) -> list[list[int]]:
    """Prompt and answer, and what might have come after it: drafts run past the end."""
    return [[*prompt, *answer.token_ids, 1, 2, 3, 4] for prompt, answer in zip(prompts, answers, strict=True)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def both(
    model: Path, params: SamplingParams | list[SamplingParams], accuracy: float, eos: tuple[int, ...] = (), **settings: Any
) -> tuple[list[Answer], list[Answer], Any]:
    """Answers without and with drafts, and what the drafts were worth."""
    prompts = many_prompts()
    plain = run(make_runner(model, **settings), prompts, params, eos_token_ids=eos)
    parts = {"drafter": knowing_drafter(sequences_of(prompts, plain), accuracy)}
    runner = make_runner(model, parts, speculative_config=NGRAM, **settings)
    drafted = run(runner, prompts, params, parts, eos_token_ids=eos, stagger=1)
    assert runner.speculation is not None
    return plain, drafted, runner.speculation.stats


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_in_every_shape_of_step(model: Path, shape: str, accuracy: float) -> None:
    plain, drafted, stats = both(model, GREEDY, accuracy, **SHAPES[shape])
    assert drafted == plain
    assert stats.num_verifications > 0
    if accuracy == 0:
        assert stats.tokens_per_step == 1
    if accuracy == 1 and shape == "plain":
        assert stats.tokens_per_step > 3


@pytest.mark.parametrize("settings", SAMPLED)
def test_sampled_with_every_setting(model: Path, settings: str) -> None:
    values = {"max_tokens": 12, "ignore_eos": True, **SAMPLED[settings]}
    params = [SamplingParams(seed=10 + i, **values) for i in range(len(many_prompts()))]
    plain, drafted, stats = both(model, params, 0.7)
    assert drafted == plain
    assert stats.num_verifications > 0


def test_all_settings_in_one_batch_under_preemption(model: Path) -> None:
    names = list(SAMPLED)
    params = [
        SamplingParams(seed=i, ignore_eos=True, **{"max_tokens": 10, **SAMPLED[names[i % len(names)]]})
        for i in range(len(many_prompts()))
    ]
    plain, drafted, _ = both(model, params, 0.7, **SHAPES["preemption and chunks"])
    assert drafted == plain


def test_an_end_token_inside_the_draft_window_ends_the_answer_there(model: Path) -> None:
    plain, drafted, _ = both(model, SamplingParams(temperature=0, max_tokens=12), 1.0)
    third = plain[4].token_ids[2]
    plain, drafted, _ = both(model, SamplingParams(temperature=0, max_tokens=12), 1.0, eos=(third,))
    assert drafted == plain
    assert len(drafted[4].token_ids) == 3
    assert drafted[4].finish_reason is FinishReason.STOP


def test_min_tokens_masks_the_end_token_in_each_row_of_the_window(model: Path) -> None:
    plain, _, _ = both(model, GREEDY, 1.0)
    third = plain[4].token_ids[2]
    params = SamplingParams(temperature=0, max_tokens=12, min_tokens=5)
    plain, drafted, _ = both(model, params, 1.0, eos=(third,))
    assert drafted == plain
    assert len(drafted[4].token_ids) >= 5


def test_max_tokens_is_met_to_the_token(model: Path) -> None:
    for max_tokens in (1, 2, 3, 4, 5):
        _, drafted, _ = both(model, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), 1.0)
        assert {len(answer.token_ids) for answer in drafted} == {max_tokens}


def test_prompt_logprobs_come_beside_drafts_of_others(model: Path) -> None:
    params = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=i % 2 or None) for i in range(8)]
    plain, drafted, _ = both(model, params, 0.8, **SHAPES["chunks"])
    assert drafted == plain


def test_200_prompts_with_ngram_drafts_answer_as_without(model: Path) -> None:
    """Case 26: greedy, with min_tokens and stop tokens inside draft windows, short prompts of few tokens that repeat."""
    rng = random.Random(26)
    prompts = [[rng.randrange(rng.choice([3, 101])) for _ in range(rng.randint(1, 24))] for _ in range(200)]
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=rng.randint(1, 16),
            min_tokens=0 if i % 3 else 1,
            stop_token_ids=rng.sample(range(101), 8) if i % 2 else [],
            ignore_eos=True,
        )
        for i in range(200)
    ]
    plain = run(make_runner(model), prompts, params)
    runner = make_runner(model, speculative_config={**NGRAM, "prompt_lookup_min": 1})
    assert run(runner, prompts, params) == plain
    assert runner.speculation is not None
    assert 1 < runner.speculation.stats.tokens_per_step < 4
    assert {answer.finish_reason for answer in plain} == {FinishReason.STOP, FinishReason.LENGTH}


# ---------------------------------------------------------------- verification by a part of one's own


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
def test_a_rejection_sampler_that_is_plugged_in_gives_the_same_greedy_tokens(model: Path, accuracy: float) -> None:
    prompts = many_prompts()
    plain = run(make_runner(model), prompts)
    parts = {"drafter": knowing_drafter(sequences_of(prompts, plain), accuracy), "rejection_sampler": RejectionSampler}
    assert run(make_runner(model, parts, speculative_config=NGRAM), prompts, components=parts) == plain


def test_a_rejection_sampler_that_is_plugged_in_serves_every_setting(model: Path) -> None:
    names, prompts = list(SAMPLED), many_prompts()
    params = [
        SamplingParams(seed=i, ignore_eos=True, **{"max_tokens": 10, **SAMPLED[names[i % len(names)]]})
        for i in range(len(prompts))
    ]
    plain = run(make_runner(model), prompts, params)
    parts = {"drafter": knowing_drafter(sequences_of(prompts, plain), 0.7), "rejection_sampler": RejectionSampler}
    drafted = run(make_runner(model, parts, speculative_config=NGRAM), prompts, params, parts)
    for answer, p in zip(drafted, params, strict=True):
        assert len(answer.token_ids) >= min(p.min_tokens, 10)
        assert answer.finish_reason is not None
        assert not p.allowed_token_ids or set(answer.token_ids) <= set(p.allowed_token_ids)
        assert p.logprobs is None or len(answer.logprobs) == len(answer.token_ids)


def test_a_part_that_verifies_greedy_requests_only_leaves_the_others_to_the_engine(model: Path) -> None:
    class OnlyGreedy(RejectionSampler):
        capabilities = frozenset({"greedy"})

    prompts = many_prompts()
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=10, ignore_eos=True) for i in range(len(prompts))]
    plain = run(make_runner(model), prompts, params)
    parts = {"drafter": knowing_drafter(sequences_of(prompts, plain), 0.7), "rejection_sampler": OnlyGreedy}
    assert run(make_runner(model, parts, speculative_config=NGRAM), prompts, params, parts) == plain
