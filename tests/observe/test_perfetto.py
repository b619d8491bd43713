"""The exported file is what a trace viewer expects: every event complete, in order, and slices of a thread nested or apart."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from minivllm.observe import perfetto
from minivllm.observe.trace import Trace
from tests.core.harness import make_request
from tests.observe.harness import recording_engine, run
from tests.observe.test_recorder import make_recording_engine_with_wall_clock

NEEDED = {"M": {"args"}, "X": {"ts", "dur"}, "C": {"ts", "args"}, "i": {"ts", "s"}}


@pytest.fixture(scope="module")
def trace() -> Trace:
    return run(recording_engine(num_blocks=7), make_request("a", 8, max_tokens=10), make_request("b", 8, max_tokens=10))


def exported(trace: Trace, tmp_path: Path) -> dict[str, Any]:
    perfetto.export(trace, tmp_path / "run.json")
    return json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))


def test_every_event_has_what_its_kind_needs(trace: Trace, tmp_path: Path):
    document = exported(trace, tmp_path)
    assert document["displayTimeUnit"] == "ms" and document["otherData"]["block_size"] == "4"
    for event in document["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} | NEEDED[event["ph"]] <= set(event)
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0


def test_times_are_microseconds_and_in_order(trace: Trace):
    timed = [event["ts"] for event in perfetto.events(trace) if "ts" in event]
    assert timed == sorted(timed)
    execute = [event for event in perfetto.events(trace) if event["name"] == "execute"]
    assert [event["dur"] for event in execute] == [1e6] * sum(bool(step.tokens) for step in trace.steps)


def test_a_process_for_each_role_and_a_thread_for_each_request(trace: Trace):
    named = [event for event in perfetto.events(trace) if event["name"] in ("process_name", "thread_name")]
    assert [e["args"]["name"] for e in named if e["name"] == "process_name"] == ["scheduler", "worker", "requests"]
    threads = [e["args"]["name"] for e in named if e["name"] == "thread_name" and e["pid"] == perfetto.REQUESTS]
    assert threads == ["request a", "request b"]


def test_slices_of_a_thread_follow_each_other():
    trace = run(make_recording_engine_with_wall_clock(), make_request("a", 9, max_tokens=6), make_request("b", 5, max_tokens=3))
    of_thread = defaultdict(list)
    for event in perfetto.events(trace):
        if event["ph"] == "X":
            of_thread[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(of_thread) == 4
    for slices in of_thread.values():
        for (_, end), (begin, _) in pairwise(slices):
            assert begin >= end - 0.01  # microseconds, rounded


def test_counters_and_moments_are_there(trace: Trace):
    events = perfetto.events(trace)
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"tokens in the step", "free blocks", "requests"}
    moments = [event["name"] for event in events if event["ph"] == "i"]
    assert moments.count("preempted") == 1 and moments.count("end") == 2 and moments.count("first token") == 2


def test_a_request_that_came_before_the_trace_starts_at_zero():
    engine = recording_engine()
    engine.add_request(make_request("a", 5, max_tokens=4))
    engine.step()
    engine.trace.clear()
    assert min(event["ts"] for event in perfetto.events(run(engine)) if "ts" in event) == 0


def test_a_failed_step_is_marked():
    def fault(step: Any) -> None:
        raise RuntimeError("no")

    trace = run(recording_engine(echo={"fault": fault}), make_request("a", 5))
    (failed,) = [event for event in perfetto.events(trace) if event["name"] == "step failed"]
    assert failed["args"]["error"] == "RuntimeError: no"


def test_an_empty_trace_is_a_file_too(tmp_path: Path):
    assert all(event["ph"] == "M" for event in exported(Trace(), tmp_path)["traceEvents"])
