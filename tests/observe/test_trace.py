"""Trace: plain data that says of each request what its user felt, and comes back from a file as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from minivllm.observe.trace import RequestRecord, ScheduledTokens, StepRecord, Trace
from tests.core.harness import make_request
from tests.observe.harness import recording_engine, run


def test_a_trace_comes_back_from_its_file(tmp_path: Path):
    trace = run(recording_engine(12), *(make_request(name, 9, max_tokens=12) for name in "abc"))
    assert trace.steps and trace.requests["a"].token_times and any(step.preempted for step in trace.steps)
    trace.save(tmp_path / "run.jsonl")
    loaded = Trace.load(tmp_path / "run.jsonl")
    assert loaded == trace
    assert isinstance(loaded.steps[0].tokens["a"], ScheduledTokens)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ('{"format": "something"}\n', r"line 1 .* must say format 'minivllm-trace'"),
        ('{"format": "minivllm-trace", "version": 99}\n', "version 99 is not 1"),
        ("not json\n", "line 1"),
        ("[]\n", "line 1"),
        ("[" * 50_000 + "\n", "line 1"),
    ],
)
def test_another_file_is_refused_with_its_line(text: str, message: str, tmp_path: Path):
    (tmp_path / "x.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        Trace.load(tmp_path / "x.jsonl")


def test_a_line_that_is_no_record_is_named(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    Trace(model="m").save(path)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"step": {"index": 0}}\n')
    with pytest.raises(ValueError, match="line 2 is not a line of a trace"):
        Trace.load(path)


def test_latencies_of_a_request_are_counted_from_its_arrival():
    request = RequestRecord("a", arrival=2.0, first_token=5.0, token_times=[5.0, 6.0, 6.0, 9.0], finish=9.0)
    assert request.ttft == 3.0
    assert request.itl == [1.0, 0.0, 3.0]
    assert request.tpot == pytest.approx(4 / 3)
    assert request.e2e == 7.0
    assert request.num_output_tokens == 4


def test_a_request_without_tokens_or_end_has_no_latencies():
    request = RequestRecord("a", arrival=2.0)
    assert (request.ttft, request.itl, request.tpot, request.e2e) == (None, [], None, None)
    assert RequestRecord("a", 0.0, first_token=1.0, token_times=[1.0]).tpot is None


def test_a_step_counts_its_prefill_and_decode_tokens():
    step = StepRecord(0, 1.0, 0.25, 1.0, 0.5, 0.25, tokens={"a": ScheduledTokens(0, 7, 7), "b": ScheduledTokens(9, 1)})
    assert (step.num_tokens, step.num_prefill_tokens, step.num_decode_tokens) == (8, 7, 1)
    assert (step.duration, step.end) == (2.0, 3.0)
