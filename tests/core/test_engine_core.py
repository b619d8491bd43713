"""EngineCore: what is refused at the door, and how small a failure stays."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from minivllm.config import EngineConfig
from minivllm.core.engine_core import EngineCore
from minivllm.core.scheduler import Scheduler
from minivllm.core.step import ExecutorDeadError, FinishReason, SchedulerOutput
from minivllm.sim.echo import EchoExecutor
from tests.core.harness import Driver, generate, make_engine, make_request, oracle

pytestmark = pytest.mark.usefixtures("prefix_cache")

# ---------------------------------------------------------------- the door


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "The prompt is empty"),
        ([5, -1], "Token 1 of the prompt is -1; token ids are integers from 0 to 999"),
        ([5, 6, 1000], "Token 2 of the prompt is 1000"),
        ([5.0], r"Token 0 of the prompt is 5\.0"),
        (["a"], "Token 0 of the prompt is 'a'"),
        ([True], "Token 0 of the prompt is True"),
    ],
)
def test_case_14_and_16_a_bad_prompt_is_refused_and_the_engine_lives(prompt: list, words: str):
    engine = make_engine()
    with pytest.raises(ValueError, match=words):
        engine.add_request(make_request("a", prompt))
    assert not engine.has_unfinished_requests()
    good = make_request("a", 5)
    assert generate(engine, good)["a"].token_ids == oracle(engine, good)[0]


def test_without_a_vocabulary_size_only_negative_ids_are_refused():
    engine = EngineCore(EngineConfig(block_size=4).resolved("cpu"), EchoExecutor(10, 4))
    engine.add_request(make_request("a", [10**9]))
    with pytest.raises(ValueError, match="is -1"):
        engine.add_request(make_request("b", [-1]))


def test_a_stop_token_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="stop_token_ids has 1005, but the vocabulary ends at 999"):
        make_engine().add_request(make_request("a", 3, stop_token_ids=[5, 1005]))


def test_a_max_model_len_put_around_the_fitting_is_refused_at_start():
    with pytest.raises(ValueError, match="max_model_len=41 does not fit the KV pool: 10 usable blocks of 4 hold 40 tokens"):
        make_engine(11, max_model_len=41)
    assert make_engine(11).config.max_model_len == 40
    assert make_engine(11, max_model_len=40).config.max_model_len == 40


def test_a_config_that_was_not_resolved_is_refused():
    with pytest.raises(ValueError, match=r"call EngineConfig\.resolved"):
        EngineCore(EngineConfig(), EchoExecutor(10, 16))


def test_the_core_imports_no_torch():
    code = "import sys, minivllm.core.engine_core, minivllm.sim.echo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------- aborts


def test_abort_of_waiting_running_and_unknown_requests():
    driver = Driver(make_engine(max_num_seqs=1))
    driver.add(make_request("a", 5), make_request("b", 5), make_request("c", 5))
    driver.step()
    driver.engine.abort_requests(["b", "a", "nobody", "a"])
    driver.check(kv=True)
    assert driver.step().finished_req_ids == ["b", "a"]
    driver.run()
    assert driver.answers["c"].token_ids == oracle(driver.engine, make_request("c", 5))[0]
    assert driver.answers["b"].finish_reason is None  # who aborts needs no news


def test_the_worker_is_told_of_the_end_even_if_nothing_else_runs_for_a_while():
    driver = Driver(make_engine())
    driver.add(make_request("a", 5))
    driver.step()
    driver.engine.abort_requests(["a"])
    for _ in range(3):
        assert driver.begin() is False
        driver.end()
    driver.add(make_request("b", 5))
    driver.begin()
    assert driver.steps[-1].finished_req_ids == ["a"]


# ---------------------------------------------------------------- failures


def planted(*failing_steps: int) -> Any:
    def fault(step: SchedulerOutput) -> None:
        if step.step_id in failing_steps:
            raise RuntimeError("out of memory")

    return fault


@pytest.mark.parametrize("deferred", [False, True], ids=["raises in submit", "raises in result"])
def test_a_forward_that_raises_fails_the_requests_of_its_step_and_no_other(deferred: bool):
    engine = make_engine(max_num_seqs=2, echo={"fault": planted(1)}, deferred=deferred)
    driver = Driver(engine, expect_errors=True)
    requests = [make_request(name, 5) for name in "abcd"]
    driver.add(*requests)
    answers = driver.run()
    for name in "ab":
        assert answers[name].finish_reason is FinishReason.ERROR
        assert answers[name].error == "The forward pass of step 1 failed: RuntimeError: out of memory"
    for request in requests[2:]:
        assert answers[request.request_id].token_ids == oracle(engine, request)[0]
    again = make_request("a", 5)
    driver.add(again)
    assert driver.run()["a"].token_ids == oracle(engine, again)[0]


def test_hashes_published_by_a_failed_step_are_taken_back():
    """Step 0 computes 8 tokens, step 1 fails on the next 8: another request with the same prompt finds the first 8 only."""
    driver = Driver(make_engine(max_num_batched_tokens=8, echo={"fault": planted(1)}), expect_errors=True)
    prompt = list(range(50, 70))
    driver.add(make_request("a", prompt))
    driver.run()
    request = make_request("b", prompt)
    driver.add(request)
    answer = driver.run()["b"]
    assert answer.num_cached_tokens == 8
    assert answer.token_ids == oracle(driver.engine, request)[0]


def test_hashes_of_a_request_aborted_in_a_step_that_then_fails_are_taken_back():
    driver = Driver(make_engine(echo={"fault": planted(0)}, deferred=True), expect_errors=True)
    prompt = list(range(50, 70))
    driver.add(make_request("a", prompt), make_request("other", 3))
    driver.begin()
    driver.engine.abort_requests(["a"])
    driver.end()
    driver.add(make_request("b", prompt))
    assert driver.run()["b"].num_cached_tokens == 0


def test_news_of_a_failed_step_is_told_again():
    """a ends in step 0; step 1, which tells so, fails; step 2 tells it again, with the failed b."""
    driver = Driver(make_engine(echo={"fault": planted(1)}), expect_errors=True)
    driver.add(make_request("a", 5, max_tokens=1), make_request("b", 5))
    driver.run()
    driver.add(make_request("c", 5))
    driver.begin()
    assert driver.steps[-1].finished_req_ids == ["a", "b"]


def test_steps_scheduled_on_top_of_a_failed_one_fail_with_it():
    """b is admitted while a's step is in flight, and starts from the blocks that step was to compute."""
    driver = Driver(make_engine(echo={"fault": planted(0)}, deferred=True), expect_errors=True)
    prompt = list(range(50, 62))
    driver.add(make_request("a", prompt))
    driver.begin()
    driver.add(make_request("b", [*prompt, 5]))
    driver.begin()
    assert driver.last.num_scheduled_tokens == {"b": 1}
    driver.end()
    assert driver.answers["a"].finish_reason is driver.answers["b"].finish_reason is FinishReason.ERROR
    driver.add(again := make_request("b", [*prompt, 5]))
    answer = driver.run()["b"]
    assert (answer.token_ids, answer.num_cached_tokens) == (oracle(driver.engine, again)[0], 0)


def test_an_executor_that_can_compute_nothing_any_more_ends_the_engine():
    def fault(step: SchedulerOutput) -> None:
        raise ExecutorDeadError("illegal memory access")

    engine = make_engine(echo={"fault": fault})
    engine.add_request(make_request("a", 5))
    with pytest.raises(ExecutorDeadError, match="illegal memory access"):
        engine.step()
    assert not engine.has_unfinished_requests()  # none waits for an answer that cannot come


def test_an_interrupt_undoes_the_step_and_is_raised():
    def interrupt(step: SchedulerOutput) -> None:
        if step.step_id == 1:
            raise KeyboardInterrupt

    driver = Driver(make_engine(echo={"fault": interrupt}))
    driver.add(make_request("a", 5))
    driver.step()
    driver.begin()
    with pytest.raises(KeyboardInterrupt):
        driver.end()
    assert not driver.engine.has_unfinished_requests()
    driver.check(kv=True)
    driver.add(make_request("b", 5))
    assert driver.run()["b"].token_ids == oracle(driver.engine, make_request("b", 5))[0]


def test_a_scheduler_that_is_stuck_fails_its_requests_instead_of_spinning():
    class Stuck(Scheduler):
        def num_new_tokens(self, *args: Any) -> int:
            return 0

    engine = make_engine(max_num_seqs=3, components={"scheduler": Stuck})
    engine.add_request(make_request("a", 5))
    outputs = [engine.step() for _ in range(4)]
    assert outputs[:3] == [[], [], []]
    (output,) = outputs[3]
    assert output.finish_reason is FinishReason.ERROR
    assert "Stuck scheduled no token in 4 steps although 1 requests wait" in str(output.error)
    assert not engine.has_unfinished_requests()


def test_a_step_without_requests_is_nothing_however_often():
    engine = make_engine(max_num_seqs=1)
    assert [engine.step() for _ in range(5)] == [[]] * 5


# ---------------------------------------------------------------- the prefix cache


def test_reset_prefix_cache_waits_for_the_running():
    driver = Driver(make_engine())
    driver.add(make_request("a", list(range(50, 62))))
    driver.step()
    assert not driver.engine.reset_prefix_cache()
    driver.run()
    driver.add(make_request("b", list(range(50, 62))))
    assert driver.run()["b"].num_cached_tokens == 8
    assert driver.engine.reset_prefix_cache()
    driver.add(make_request("c", list(range(50, 62))))
    assert driver.run()["c"].num_cached_tokens == 0


def test_the_second_turn_of_a_chat_finds_the_first_turns_answer():
    driver = Driver(make_engine())
    first = make_request("a", list(range(50, 60)), max_tokens=7)
    driver.add(first)
    answer = driver.run()["a"].token_ids
    driver.add(second := make_request("b", [*range(50, 60), *answer, 3, 4]))
    assert driver.run()["b"].num_cached_tokens == 16  # 10 + 6 computed outputs; the seventh was never computed
    assert driver.answers["b"].token_ids == oracle(driver.engine, second)[0]


def test_a_salt_separates_tenants():
    driver = Driver(make_engine())
    cached = []
    for name, salt in [("a", "x"), ("b", "y"), ("c", None), ("d", "x")]:
        driver.add(make_request(name, list(range(50, 62)), cache_salt=salt))
        cached.append(driver.run()[name].num_cached_tokens)
    assert cached == [0, 0, 0, 8]


def test_prefix_caching_can_be_switched_off():
    driver = Driver(make_engine(enable_prefix_caching=False))
    for name in "ab":
        driver.add(make_request(name, list(range(50, 62))))
        assert driver.run()[name].num_cached_tokens == 0
    assert driver.engine.reset_prefix_cache()
