"""Scheduler.update_from_output(): what becomes of the tokens a step brings back."""

from __future__ import annotations

import math
from typing import Any

import pytest

from minivllm.core.request import Request
from minivllm.core.step import FinishReason, StepOutput
from minivllm.sampling_params import SamplingParams
from tests.core.harness import Driver, generate, make_engine, make_request, oracle

pytestmark = pytest.mark.usefixtures("prefix_cache")

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def with_outputs(n: int, **fields: frozenset[int]) -> Request:
    """A request that has just been given its n-th output token."""
    request = Request("r", [1, 2], SamplingParams(), max_tokens=5, **fields)  # type: ignore[arg-type]
    request.all_token_ids += [0] * n
    return request


# ---------------------------------------------------------------- finish_reason


@pytest.mark.parametrize(
    ("num_outputs", "token_id", "reason"),
    [(1, 50, None), (4, 50, None), (5, 50, LENGTH), (1, 7, STOP), (5, 7, STOP), (1, 9, STOP), (5, 9, STOP)],
)
def test_end_token_then_stop_token_then_length(num_outputs: int, token_id: int, reason: FinishReason | None):
    request = with_outputs(num_outputs, stop_eos_ids=frozenset({7}), stop_token_ids=frozenset({9}))
    assert make_engine().scheduler.finish_reason(request, token_id) is reason


def feed(tokens: list[int], max_model_len: int = 100, **params: Any) -> tuple[list[int], FinishReason | None, object]:
    """One request, whose step brings `tokens` at once (the first sampled, the others as if drafted)."""
    engine = make_engine(max_model_len=max_model_len)
    engine.add_request(make_request("a", 3, eos_token_ids=(7, 8), **params))
    step = engine.scheduler.schedule()
    (output,) = engine.scheduler.update_from_output(step, StepOutput({"a": tokens}))
    return output.new_token_ids, output.finish_reason, output.stop_reason


def test_the_models_end_token_stops_without_a_stop_reason_and_is_kept():
    assert feed([7], ignore_eos=False) == ([7], STOP, None)
    assert feed([8], ignore_eos=False) == ([8], STOP, None)


def test_a_stop_token_is_its_own_stop_reason():
    assert feed([9], stop_token_ids=[9]) == ([9], STOP, 9)


def test_an_end_token_that_is_also_a_stop_token_counts_as_the_end_token():
    assert feed([7], ignore_eos=False, stop_token_ids=[7]) == ([7], STOP, None)


def test_ignore_eos_ignores_end_tokens_but_not_stop_tokens():
    assert feed([7]) == ([7], None, None)
    assert feed([7], stop_token_ids=[7]) == ([7], STOP, 7)


def test_an_end_token_at_the_length_limit_is_a_stop():
    assert feed([7], max_tokens=1, ignore_eos=False) == ([7], STOP, None)
    assert feed([50], max_tokens=1, ignore_eos=False) == ([50], LENGTH, None)


def test_tokens_after_the_end_are_dropped_one_at_a_time():
    assert feed([50, 51, 9, 52], max_tokens=9, stop_token_ids=[9]) == ([50, 51, 9], STOP, 9)
    assert feed([50, 51, 52, 53], max_tokens=2) == ([50, 51], LENGTH, None)


def test_reaching_max_model_len_is_length_also_without_max_tokens():
    assert feed([50, 51, 52], max_model_len=5, max_tokens=None) == ([50, 51], LENGTH, None)
    assert feed([50, 51, 52], max_model_len=5, max_tokens=90) == ([50, 51], LENGTH, None)


def test_logprobs_are_cut_with_the_tokens():
    answers = generate(
        make_engine(echo={"num_speculative_tokens": 4, "draft_accuracy": 1.0}), make_request("a", 3, max_tokens=3, logprobs=1)
    )
    assert len(answers["a"].token_ids) == 3
    engine = make_engine()
    engine.add_request(make_request("a", 3, max_tokens=1, logprobs=1))
    engine.begin_step()
    (output,) = engine.end_step()
    assert output.new_logprobs is not None
    (top,) = output.new_logprobs
    assert top.token_ids[0] == output.new_token_ids[0] and top.logprobs[0] == pytest.approx(math.log(0.5))


# ---------------------------------------------------------------- drafts


def start_with_drafts(accuracy: float, **config: Any) -> Driver:
    driver = Driver(make_engine(echo={"num_speculative_tokens": 3, "draft_accuracy": accuracy}, **config))
    driver.add(make_request("a", 5, max_tokens=20))
    driver.step()
    return driver


def test_accepted_drafts_come_with_the_token_after_them():
    driver = start_with_drafts(1.0)
    request = driver.engine.scheduler.requests["a"]
    assert driver.step().num_scheduled_tokens == {"a": 4}
    assert (request.num_output_tokens, request.num_computed_tokens) == (1 + 4, 9)


def test_rejected_drafts_are_taken_off_the_computed_count():
    driver = start_with_drafts(0.0)
    request = driver.engine.scheduler.requests["a"]
    assert driver.step().num_scheduled_tokens == {"a": 4}
    assert (request.num_output_tokens, request.num_computed_tokens) == (2, 6)


def test_rejected_drafts_of_a_request_preempted_since_are_not_taken_off():
    driver = start_with_drafts(0.0)
    request = driver.engine.scheduler.requests["a"]
    driver.begin()
    driver.engine.scheduler.preempt(request)
    driver.end()
    assert request.num_computed_tokens == 0
    driver.run()
    assert driver.answers["a"].token_ids == oracle(driver.engine, make_request("a", 5, max_tokens=20))[0]


def test_drafts_are_verified_once_and_cut_by_the_budget():
    driver = start_with_drafts(1.0, max_num_batched_tokens=5, max_num_seqs=2)  # its prompt took all of the first step
    request = driver.engine.scheduler.requests["a"]
    assert len(request.spec_token_ids) == 3
    driver.engine.scheduler.max_num_batched_tokens = 3
    proposed = list(request.spec_token_ids)
    driver.begin()
    assert driver.last.scheduled_spec_decode_tokens == {"a": proposed[:2]}
    assert request.spec_token_ids == []  # the third is lost: verified drafts are proposed anew
    driver.end()


def test_drafts_proposed_for_a_prefill_chunk_or_a_preempted_request_are_dropped():
    engine = make_engine(max_num_batched_tokens=8)
    engine.add_request(make_request("a", 12))
    scheduler = engine.scheduler
    request = scheduler.requests["a"]
    step = scheduler.schedule()
    scheduler.update_from_output(step, StepOutput({"a": []}, draft_token_ids={"a": [5, 6]}))
    assert request.spec_token_ids == []
    step = scheduler.schedule()
    scheduler.preempt(request)
    scheduler.update_from_output(step, StepOutput({"a": [5]}, draft_token_ids={"a": [5, 6]}))
    assert (request.spec_token_ids, request.output_token_ids) == ([], [5])


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("params", [{"min_tokens": 6}, {"stop_token_ids": [3, 4, 5]}, {"min_tokens": 3, "stop_token_ids": [4]}])
def test_case_26_stops_and_min_tokens_inside_a_draft_window(accuracy: float, params: dict):
    """A vocabulary of 12 with 2 end tokens: requests end by chance, all over the window."""
    echo = {"num_speculative_tokens": 4, "draft_accuracy": accuracy, "vocab_size": 12}
    engine = make_engine(echo=echo)
    requests = [
        make_request(f"r{i}", [i % 12, i // 12, 2], max_tokens=15, eos_token_ids=(0, 1), ignore_eos=False, **params)
        for i in range(40)
    ]
    answers = generate(engine, *requests)
    for request in requests:
        answer = answers[request.request_id]
        assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == oracle(engine, request)


# ---------------------------------------------------------------- late news


def test_output_for_an_unknown_request_is_skipped():
    engine = make_engine()
    engine.add_request(make_request("a", 3))
    engine.add_request(make_request("b", 3))
    step = engine.scheduler.schedule()
    engine.abort_requests(["a"])
    outputs = engine.scheduler.update_from_output(step, StepOutput({"a": [5], "b": [6]}))
    assert [output.request_id for output in outputs] == ["b"]


def test_a_request_preempted_in_flight_keeps_its_late_token_and_waits_for_it():
    driver = Driver(make_engine(deferred=True))
    driver.add(make_request("a", 5))
    driver.step()
    driver.begin()
    scheduler = driver.engine.scheduler
    request = scheduler.requests["a"]
    scheduler.preempt(request)
    assert driver.begin() is False  # it has tokens in flight: not to be admitted before they are known
    driver.end()
    assert (request.num_output_tokens, request.num_in_flight_tokens) == (2, 0)
    driver.run()
    assert driver.answers["a"].token_ids == oracle(driver.engine, make_request("a", 5))[0]


def test_a_request_whose_late_token_ends_it_leaves_the_waiting_queue():
    driver = Driver(make_engine(deferred=True))
    driver.add(make_request("a", 5, max_tokens=1))
    driver.begin()
    driver.engine.scheduler.preempt(driver.engine.scheduler.requests["a"])
    driver.end()
    assert driver.answers["a"].finish_reason is LENGTH
    driver.run()


def test_an_error_of_one_request_ends_it_alone_and_takes_back_its_hashes():
    faults = iter([{"a": "NaN in the logits"}])
    driver = Driver(make_engine(echo={"fault": lambda step: next(faults, {})}), expect_errors=True)
    a, b = make_request("a", [*range(50, 62)]), make_request("b", 12)
    driver.add(a, b)
    driver.step()
    answer = driver.answers["a"]
    assert (answer.finish_reason, answer.error, answer.token_ids) == (FinishReason.ERROR, "NaN in the logits", [])
    driver.add(make_request("c", [*range(50, 62)]))
    driver.run()
    assert driver.answers["b"].token_ids == oracle(driver.engine, b)[0]
    assert driver.answers["c"].num_cached_tokens == 0
