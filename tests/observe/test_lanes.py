"""Lanes: the same trace read request by request."""

from __future__ import annotations

from minivllm.observe.lanes import DECODE, IDLE, PREEMPTED, PREFILL, WAITING, Lane, lanes
from minivllm.observe.trace import RequestRecord, Trace
from tests.core.harness import make_request
from tests.observe.harness import recording_engine, run


def kinds(lane: Lane) -> list[tuple[str, tuple[float, float]]]:
    return [(span.kind, span.steps) for span in lane.spans]


def test_a_request_waits_prefills_and_decodes():
    trace = run(
        recording_engine(max_num_seqs=1, max_num_batched_tokens=4), make_request("a", 6, max_tokens=3), make_request("b", 3, 1)
    )
    a, b = lanes(trace)
    assert kinds(a) == [(PREFILL, (0, 2)), (DECODE, (2, 4))]
    assert kinds(b) == [(WAITING, (0, 4)), (PREFILL, (4, 5))]
    assert (a.end, b.end) == ((4, 4.0), (5, 5.0))
    assert [span.num_tokens for span in a.spans] == [6, 2]
    assert b.spans[0].times == (0.0, 4.0)


def test_a_preempted_request_says_when_and_waits_again():
    trace = run(recording_engine(num_blocks=7), make_request("a", 8, max_tokens=10), make_request("b", 8, max_tokens=10))
    lane = lanes(trace)[1]
    assert [kind for kind, _ in kinds(lane)] == [PREFILL, DECODE, PREEMPTED, PREFILL, DECODE]
    ((step, time),) = lane.preemptions
    assert trace.steps[int(step)].preempted == ["b"] and time == trace.steps[int(step)].start
    assert lane.spans[2].steps[0] == step
    assert [hit[2] for hit in lane.hits] == [tokens for s in trace.steps if (tokens := s.cached_tokens.get("b"))]


def test_a_running_request_without_tokens_in_a_step_is_idle():
    trace = run(recording_engine(), make_request("a", 5, max_tokens=4))
    trace.steps[2].tokens.clear()  # as if another's prompt had taken the whole budget
    (lane,) = lanes(trace)
    assert kinds(lane) == [(PREFILL, (0, 1)), (DECODE, (1, 2)), (IDLE, (2, 3)), (DECODE, (3, 4))]


def test_a_request_aborted_before_any_step_ends_where_it_stood():
    engine = recording_engine()
    engine.add_request(make_request("a", 5))
    engine.abort_requests(["a"])
    (lane,) = lanes(engine.trace)
    assert lane.spans == [] and lane.end == (0, 0.0)


def test_a_running_request_reaches_to_the_end_of_the_trace():
    engine = recording_engine(max_num_seqs=1)
    engine.add_request(make_request("a", 5, max_tokens=9))
    engine.add_request(make_request("b", 5, max_tokens=9))
    engine.step()
    engine.step()
    a, b = lanes(engine.trace)
    assert a.end is None and kinds(b) == [(WAITING, (0, 2))]


def test_lanes_are_in_order_of_arrival():
    trace = Trace(requests={"late": RequestRecord("late", 2.0), "early": RequestRecord("early", 1.0)})
    assert [lane.request.request_id for lane in lanes(trace)] == ["early", "late"]
