"""Metrics: from a trace small enough to check by hand."""

from __future__ import annotations

import math

import pytest

from minivllm.bench import metrics
from minivllm.observe.trace import RequestRecord, ScheduledTokens, StepRecord, Trace
from tests.core.harness import make_request
from tests.observe.harness import recording_engine, run


@pytest.fixture
def trace() -> Trace:
    """a: TTFT 1, ITLs 1 and 3.  b: TTFT 4, one token.  c: aborted.  d: never admitted."""
    return Trace(
        requests={
            "a": RequestRecord("a", 0.0, 1.0, [1.0, 2.0, 5.0], 10, 4, 5.0, "length", group="x", turn=0),
            "b": RequestRecord("b", 1.0, 5.0, [5.0], 10, 0, 5.0, "stop", group="x", turn=1),
            "c": RequestRecord("c", 1.0, 2.0, [2.0, 3.0], 10, 2, 4.0, "abort", group="y"),
            "d": RequestRecord("d", 2.0, num_prompt_tokens=10),
        },
        steps=[StepRecord(0, 0.0, preempted=["a"]), StepRecord(1, 9.0, execute_s=1.0, preempted=["b", "c"])],
    )


def test_latencies_are_of_those_who_were_served(trace: Trace):
    assert metrics.ttft(trace) == [1.0, 4.0]
    assert metrics.tpot(trace) == [2.0]
    assert metrics.itl(trace) == [1.0, 3.0]
    assert metrics.e2e(trace) == [5.0, 4.0]


def test_a_group_or_a_turn_can_be_looked_at_alone(trace: Trace):
    assert metrics.ttft(metrics.select(trace, turn=1)) == [4.0]
    assert metrics.ttft(metrics.select(trace, group="x", turn=0)) == [1.0]
    assert metrics.ttft(metrics.select(trace, group="y")) == []
    assert metrics.cache_hit_rate(metrics.select(trace, group="x")) == 0.2


def test_percentiles_lie_between_neighbours_in_proportion():
    values = [4.0, 1.0, 3.0, 2.0]
    assert [metrics.percentile(values, p) for p in (0, 50, 75, 100)] == [1.0, 2.5, 3.25, 4.0]
    assert metrics.percentile([7.0], 99) == 7.0 and math.isnan(metrics.percentile([], 50))
    with pytest.raises(ValueError, match="between 0 and 100, got 101"):
        metrics.percentile(values, 101)


def test_a_summary_has_five_numbers():
    assert metrics.summarize([1.0, 2.0, 6.0]) == metrics.Summary(3.0, 2.0, pytest.approx(5.2), pytest.approx(5.92), 6.0)
    assert math.isnan(metrics.summarize([]).mean)
    assert "p99 5.92" in str(metrics.summarize([1.0, 2.0, 6.0]))


def test_goodput_counts_whoever_met_every_objective(trace: Trace):
    assert metrics.goodput(trace, ttft=2.0) == metrics.Goodput(1, 4, 0.25, 0.1)
    assert metrics.goodput(trace, ttft=4.0).num_good == 2
    assert metrics.goodput(trace, ttft=4.0, tpot=1.5).num_good == 1  # b has one token: no TPOT to miss
    assert metrics.goodput(trace, e2e=4.5).num_good == 1


def test_goodput_without_an_objective_is_refused(trace: Trace):
    with pytest.raises(ValueError, match="at least one of ttft=, tpot= and e2e="):
        metrics.goodput(trace)
    with pytest.raises(ValueError, match="tpot must be a positive number of seconds, got 0"):
        metrics.goodput(trace, tpot=0)


def test_rates_are_over_the_whole_run(trace: Trace):
    assert metrics.duration(trace) == 10.0
    assert metrics.output_throughput(trace) == 0.6
    assert metrics.cache_hit_rate(trace) == 6 / 40
    assert metrics.num_preemptions(trace) == 3


def test_an_empty_trace_has_no_numbers_and_no_errors():
    empty = Trace()
    assert metrics.ttft(empty) == metrics.itl(empty) == []
    assert math.isnan(metrics.cache_hit_rate(empty)) and math.isnan(metrics.output_throughput(empty))
    assert math.isnan(metrics.goodput(empty, ttft=1.0).share)
    assert metrics.describe(empty).startswith("0 requests")


def test_tokens_computed_again_are_counted_once_for_each_time():
    steps = [
        StepRecord(0, 0.0, tokens={"a": ScheduledTokens(0, 8, 8)}),
        StepRecord(1, 1.0, tokens={"a": ScheduledTokens(8, 1)}),
        StepRecord(2, 2.0, tokens={"a": ScheduledTokens(4, 6, 6)}),  # preempted; 4 of 9 were cached, one is new
        StepRecord(3, 3.0, tokens={"a": ScheduledTokens(10, 4, 0, num_drafts=3, num_accepted=1)}),
        StepRecord(4, 4.0, tokens={"a": ScheduledTokens(12, 1)}),  # rejected drafts are not work done twice
    ]
    assert metrics.num_recomputed_tokens(Trace(steps=steps)) == 5


def test_a_run_is_described_in_a_few_lines():
    trace = run(recording_engine(7), make_request("a", 8, max_tokens=10), make_request("b", 8, max_tokens=10))
    said = metrics.describe(trace)
    assert said.startswith("2 requests in") and "1 preemptions" in said and "TTFT" in said and said.count("\n") == 4
