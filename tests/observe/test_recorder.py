"""The recorder: a trace says what the engine did, whoever's parts it is made of, and the engine does what it did without."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.core.block_pool import BlockPool, KVCacheBlock
from minivllm.core.engine_core import EngineCore
from minivllm.core.step import FinishReason, SchedulerOutput
from minivllm.observe.clock import VirtualClock
from minivllm.observe.recorder import RecordingEngineCore
from minivllm.observe.trace import ScheduledTokens, StepRecord, Trace
from tests.core.harness import AheadScheduler, generate, make_engine, make_request
from tests.core.test_plug_in import Lab04Manager, Lab04Pool, Lab05Scheduler
from tests.observe.harness import recording_engine, run

# ---------------------------------------------------------------------- an example to follow by hand


def test_two_requests_step_by_step():
    """Blocks of 4, budget 8. "a" has 6 prompt tokens, "b" 5: two of b's fit beside a's, the others beside a's first decode."""
    trace = run(
        recording_engine(num_blocks=9, max_num_batched_tokens=8),
        make_request("a", 6, max_tokens=3),
        make_request("b", 5, max_tokens=1),
    )
    first, second, third = trace.steps
    assert first.tokens == {"a": ScheduledTokens(0, 6, 6), "b": ScheduledTokens(0, 2, 2)}
    assert first.blocks == {"a": [1, 2], "b": [3]} and first.taken == [1, 2, 3] and first.freed == []
    assert list(first.sampled) == ["a"] and len(first.sampled["a"]) == 1
    assert (first.num_running, first.num_waiting, first.num_free_blocks) == (2, 0, 5)
    assert first.cached_tokens == {"a": 0, "b": 0}

    assert second.tokens == {"a": ScheduledTokens(6, 1), "b": ScheduledTokens(2, 3, 3)}
    assert second.taken == [4] and second.freed == [4, 3] and second.finished == ["b"]
    assert second.blocks == {"a": [1, 2]} and (second.num_running, second.num_free_blocks) == (1, 6)

    assert third.finished == ["a"] and third.blocks == {} and third.num_free_blocks == 8
    assert [step.start for step in trace.steps] == [0.0, 1.0, 2.0] and third.end == 3.0
    a, b = trace.requests["a"], trace.requests["b"]
    assert (a.arrival, a.token_times, a.finish, a.finish_reason) == (0.0, [1.0, 2.0, 3.0], 3.0, "length")
    assert (b.ttft, b.num_prompt_tokens, b.num_output_tokens) == (2.0, 5, 1)
    assert (trace.block_size, trace.num_blocks, trace.max_num_batched_tokens, trace.max_num_seqs) == (4, 9, 8, 8)


def test_a_prefix_hit_is_told_and_its_blocks_are_not_evicted():
    engine = recording_engine(num_blocks=9)
    prompt = list(range(100, 110))
    run(engine, make_request("a", prompt, max_tokens=1))
    trace = run(engine, make_request("b", prompt, max_tokens=1))
    assert trace.steps[1].cached_tokens == {"b": 8}
    assert trace.steps[1].tokens["b"] == ScheduledTokens(8, 2, 2)
    assert trace.requests["b"].num_cached_tokens == 8 and trace.requests["a"].num_cached_tokens == 0
    assert set(trace.steps[0].taken) & set(trace.steps[1].taken) and trace.steps[1].evicted == []


def test_blocks_that_lose_their_cached_content_are_evicted():
    engine = recording_engine(num_blocks=5)
    run(engine, make_request("a", 8, max_tokens=1))
    trace = run(engine, make_request("b", 12, max_tokens=1))
    assert len(trace.steps[1].taken) == 3  # the pool has 4: two are nameless, two hold a's prompt
    assert len(trace.steps[1].evicted) == 1


def test_a_preemption_is_told_with_the_work_it_costs():
    trace = run(recording_engine(num_blocks=7), make_request("a", 8, max_tokens=10), make_request("b", 8, max_tokens=10))
    place, step = next((i, step) for i, step in enumerate(trace.steps) if step.preempted)
    assert step.preempted == ["b"] and "b" not in step.blocks and "b" not in step.tokens
    assert step.num_waiting == 1 and set(step.freed) - set(step.taken)
    again = next(later for later in trace.steps[place:] if "b" in later.tokens)
    known = 8 + sum(len(before.sampled.get("b", [])) for before in trace.steps[:place])
    cached = again.cached_tokens["b"]
    assert again.tokens["b"] == ScheduledTokens(cached, known - cached, known - cached)  # its outputs too are prefill now
    assert trace.requests["b"].num_preemptions == 1 and trace.requests["b"].num_cached_tokens == 0


def test_a_step_that_only_preempts_is_a_step():
    """A request that is its own victim leaves nothing to compute."""
    engine = recording_engine(num_blocks=4, max_model_len=12)
    trace = run(engine, make_request("a", 4, max_tokens=8), make_request("b", 4, max_tokens=8))
    assert all(step.tokens or step.preempted for step in trace.steps)
    assert {r.finish_reason for r in trace.requests.values()} == {"length"}


def test_drafts_are_told_with_how_many_were_right():
    engine = recording_engine(echo={"num_speculative_tokens": 3, "draft_accuracy": 1.0})
    trace = run(engine, make_request("a", 5, max_tokens=9))
    assert trace.steps[1].tokens["a"] == ScheduledTokens(5, 4, 0, num_drafts=3, num_accepted=3)
    assert trace.requests["a"].num_output_tokens == 9
    assert trace.requests["a"].itl[:4] == [1.0, 0.0, 0.0, 0.0]

    engine = recording_engine(echo={"num_speculative_tokens": 3, "draft_accuracy": 0.0})
    trace = run(engine, make_request("a", 5, max_tokens=9))
    assert [step.tokens["a"] for step in trace.steps[1:3]] == [ScheduledTokens(5, 4, 0, 3, 0), ScheduledTokens(6, 4, 0, 3, 0)]


# ---------------------------------------------------------------------- ends of all kinds


def test_an_abort_between_steps_belongs_to_the_step_before():
    engine = recording_engine()
    for name in "ab":
        engine.add_request(make_request(name, 6))
    engine.step()
    engine.abort_requests(["a", "unknown"])
    step = engine.trace.steps[-1]
    assert step.finished == ["a"] and list(step.blocks) == ["b"] and len(step.freed) == 2
    assert step.num_free_blocks == engine.kv_cache_manager.block_pool.num_free_blocks
    assert engine.trace.requests["a"].finish_reason == "abort"
    assert run(engine).requests["b"].finish_reason == "length"


def test_a_request_aborted_before_any_step_leaves_a_record():
    engine = recording_engine()
    engine.add_request(make_request("a", 6))
    engine.abort_requests(["a"])
    assert engine.trace.steps == [] and engine.trace.requests["a"].finish_reason == "abort"


def test_an_abort_in_flight_gets_no_token():
    engine = recording_engine()
    engine.add_request(make_request("a", 6))
    engine.begin_step()
    engine.abort_requests(["a"])
    engine.end_step()
    (step,) = engine.trace.steps
    assert step.finished == ["a"] and step.sampled == {} and step.blocks == {} and sorted(step.freed) == sorted(step.taken)


def test_a_failed_step_says_so_and_ends_its_requests():
    def fault(step: SchedulerOutput) -> None:
        if step.step_id == 1:
            raise RuntimeError("the card fell off")

    engine = recording_engine(echo={"fault": fault})
    trace = run(engine, make_request("a", 6), make_request("b", 6))
    assert [step.error for step in trace.steps] == [None, "RuntimeError: the card fell off"]
    assert trace.steps[1].finished == ["a", "b"] and trace.steps[1].blocks == {} and trace.steps[1].sampled == {}
    assert {r.finish_reason for r in trace.requests.values()} == {"error"}
    trace = run(engine, make_request("c", 6))
    assert trace.requests["c"].finish_reason == "length"


def test_a_request_that_fails_alone_is_told_alone():
    engine = recording_engine(echo={"fault": lambda step: {"a": "NaN"} if step.step_id == 1 else None})
    trace = run(engine, make_request("a", 6), make_request("b", 6))
    assert (trace.requests["a"].finish_reason, trace.requests["b"].finish_reason) == ("error", "length")
    assert all(step.error is None for step in trace.steps)


def test_an_abort_with_a_reason_is_told_with_it():
    """As the front end does when it finds a stop string."""
    engine = recording_engine()
    engine.add_request(make_request("a", 6))
    engine.step()
    engine.abort_requests(["a"], FinishReason.STOP)
    assert engine.trace.requests["a"].finish_reason == "stop"


# ---------------------------------------------------------------------- any engine, any parts


class PoolThatTells(BlockPool):
    """Counts what it evicts."""

    evicted: list[int]

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.evicted = []

    def allocate(self, n: int) -> list[KVCacheBlock]:
        if n <= self.num_free_blocks:
            front = [block for block, _ in zip(self.free_block_queue, range(n), strict=False)]
            self.evicted += [block.block_id for block in front if block.block_hash is not None]
        return super().allocate(n)


REQUESTS = st.lists(st.tuples(st.integers(1, 24), st.integers(1, 12), st.integers(0, 2)), min_size=1, max_size=8)


@given(sizes=REQUESTS, num_blocks=st.integers(10, 40), budget=st.integers(8, 40), drafts=st.integers(0, 2), radix=st.booleans())
def test_tables_and_blocks_agree_with_the_engine(
    sizes: list[tuple[int, int, int]], num_blocks: int, budget: int, drafts: int, radix: bool
):
    """After every step: the tables are the manager's, taken and freed say what changed, evicted is what the pool evicted."""
    prefix_cache = "radix" if radix else "hash"
    echo = {"num_speculative_tokens": drafts}
    parts = {"block_pool": PoolThatTells}
    engine = recording_engine(num_blocks, components=parts, echo=echo, max_num_batched_tokens=budget, prefix_cache=prefix_cache)
    manager = engine.kv_cache_manager
    for i, (length, max_tokens, family) in enumerate(sizes):
        prompt = [100 + family] * min(length, 9) + [200 + i] * max(0, length - 9)  # families share a prefix
        if length < engine.config.max_model_len:
            engine.add_request(make_request(f"r{i}", prompt, max_tokens=max_tokens))
    held: set[int] = set()
    while engine.has_unfinished_requests():
        num_told = len(manager.block_pool.evicted)
        engine.step()
        step = engine.trace.steps[-1]
        tables = {name: manager.get_block_ids(request) for name, request in engine.scheduler.requests.items()}
        assert step.blocks == {name: table for name, table in tables.items() if table}
        assert step.num_free_blocks == manager.block_pool.num_free_blocks
        assert (step.num_running, step.num_waiting) == (len(engine.scheduler.running), len(engine.scheduler.waiting))
        now = {block for table in step.blocks.values() for block in table}
        assert now == (held | set(step.taken)) - (set(step.freed) - (set(step.taken) & now))
        if not radix:  # the tree forgets a whole branch with its root
            assert sorted(step.evicted) == sorted(manager.block_pool.evicted[num_told:])
        held = now
    for record in engine.trace.requests.values():
        assert record.finish_reason == "length" and record.num_output_tokens == sum(
            len(step.sampled.get(record.request_id, [])) for step in engine.trace.steps
        )


@given(sizes=REQUESTS, num_blocks=st.integers(10, 40))
def test_a_recorded_engine_answers_as_one_that_is_not(sizes: list[tuple[int, int, int]], num_blocks: int):
    requests = [make_request(f"r{i}", length, max_tokens=most) for i, (length, most, _) in enumerate(sizes)]
    assert generate(recording_engine(num_blocks), *requests) == generate(make_engine(num_blocks), *requests)


@pytest.mark.parametrize(
    "parts",
    [
        {"block_pool": Lab04Pool},
        {"kv_cache_manager": Lab04Manager},
        {"scheduler": Lab05Scheduler},
        {"block_pool": Lab04Pool, "kv_cache_manager": Lab04Manager, "scheduler": Lab05Scheduler},
    ],
    ids=lambda parts: "+".join(parts),
)
def test_a_students_parts_are_recorded_too(parts: dict[str, Any]):
    trace = run(recording_engine(8, components=parts, max_num_batched_tokens=32), *(make_request(n, 9, 8) for n in "abc"))
    assert [r.num_output_tokens for r in trace.requests.values()] == [8, 8, 8]
    assert any(step.preempted for step in trace.steps)
    assert all(step.num_free_blocks == 7 - len({b for t in step.blocks.values() for b in t}) for step in trace.steps)
    assert trace.steps[-1].num_free_blocks == 7


def test_two_steps_in_flight_are_two_records():
    engine = recording_engine(deferred=True, components={"scheduler": AheadScheduler})
    engine.add_request(make_request("a", 5, max_tokens=4))
    engine.begin_step()
    while engine.has_unfinished_requests():
        engine.begin_step()
        engine.end_step()
    engine.end_step()
    assert [step.tokens["a"].is_prefill for step in engine.trace.steps] == [True] + [False] * (len(engine.trace.steps) - 1)
    assert sum(len(step.sampled.get("a", [])) for step in engine.trace.steps) == 4
    assert not engine._records


def test_steps_that_fail_together_are_closed_together():
    def fault(step: SchedulerOutput) -> None:
        raise RuntimeError("no")

    engine = recording_engine(deferred=True, components={"scheduler": AheadScheduler}, echo={"fault": fault})
    engine.add_request(make_request("a", 5, max_tokens=4))
    engine.begin_step()
    engine.begin_step()
    engine.end_step()
    assert [step.error for step in engine.trace.steps] == ["RuntimeError: no"] * 2
    assert not engine._records and engine.trace.requests["a"].finish_reason == "error"


# ---------------------------------------------------------------------- names, clearing, times


def test_a_second_request_of_the_same_name_gets_a_number():
    engine = recording_engine()
    run(engine, make_request("a", 5, max_tokens=1))
    trace = run(engine, make_request("a", 6, max_tokens=2))
    assert list(trace.requests) == ["a", "a#2"] and trace.requests["a#2"].num_prompt_tokens == 6
    assert list(trace.steps[1].tokens) == ["a#2"]


def test_clear_forgets_and_begins_the_time_anew():
    engine = recording_engine()
    run(engine, make_request("a", 5, max_tokens=2))
    engine.trace.clear()
    assert len(engine.trace) == 0 and engine.trace.requests == {}
    trace = run(engine, make_request("b", 5, max_tokens=2))
    assert list(trace.requests) == ["b"] and [step.index for step in trace.steps] == [0, 1]
    assert trace.requests["b"].arrival == 0.0 and trace.steps[0].start == 0.0


def test_a_request_that_runs_when_the_trace_is_cleared_stays_in_it():
    engine = recording_engine()
    engine.add_request(make_request("a", 5, max_tokens=4))
    engine.step()
    engine.step()
    engine.trace.clear()
    trace = run(engine)
    assert trace.requests["a"].arrival == -2.0 and trace.requests["a"].first_token == -1.0
    assert trace.requests["a"].token_times == [1.0, 2.0] and trace.requests["a"].finish == 2.0
    assert trace.steps[0].blocks == {"a": [1, 2]} and trace.steps[0].taken == []


def test_a_new_trace_leaves_the_old_one_as_it_is():
    engine = recording_engine()
    first = run(engine, make_request("a", 5, max_tokens=2))
    engine.trace = engine.new_trace()
    second = run(engine, make_request("b", 5, max_tokens=2))
    assert list(first.requests) == ["a"] and list(second.requests) == ["b"]


def test_times_are_parts_of_the_step_on_the_machine_s_clock():
    engine = make_recording_engine_with_wall_clock()
    trace = run(engine, make_request("a", 5, max_tokens=3))
    ends = [step.end for step in trace.steps]
    assert ends == sorted(ends) and all(step.schedule_s > 0 and step.execute_s > 0 for step in trace.steps)
    request = trace.requests["a"]
    assert request.token_times == sorted(request.token_times) and request.ttft is not None and request.ttft > 0


def make_recording_engine_with_wall_clock() -> RecordingEngineCore:
    from minivllm.observe.clock import WallClock

    engine = recording_engine()
    engine.clock = WallClock()
    return engine


def test_a_clock_that_runs_backwards_is_refused():
    engine = recording_engine()
    engine.clock = VirtualClock(lambda step: -1.0)
    trace = run(engine, make_request("a", 5))
    assert "step_time gave -1.0 for step 0" in str(trace.steps[0].error)


def test_an_executor_that_lags_is_waited_for():
    """On a GPU the forward pass has only begun when submit() returns: its time must not count as sampling's."""
    engine = recording_engine()
    waited: list[StepRecord] = []
    engine.executor.synchronize = lambda: waited.append(engine.trace.steps[-1])  # type: ignore[attr-defined]
    trace = run(engine, make_request("a", 5, max_tokens=3))
    assert waited == trace.steps


def test_an_engine_that_is_not_asked_records_nothing():
    engine = make_engine()
    assert type(engine) is EngineCore and not hasattr(engine, "trace")
    assert Trace() == Trace()
