"""Lanes: a trace read request by request. What each one was doing when, as spans that a figure or a trace viewer can draw.
May not know plots: pure Python.

    request B    arrival |--- waiting ---|= prefill =|= decode =|x preempted      |= prefill =|= decode =| finish
    in steps             0               2           3          5                 7           8         10
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minivllm.observe.trace import RequestRecord, StepRecord, Trace

WAITING = "waiting"  # not admitted yet
PREFILL = "prefill"
DECODE = "decode"
IDLE = "idle"  # running, but without a token of the budget
PREEMPTED = "preempted"  # its blocks taken away, waiting to be admitted again


@dataclass(slots=True)
class Span:
    """A stretch of one kind, in which `num_tokens` were computed. `steps` and `times` are (from, to); step i is i to i + 1."""

    kind: str
    steps: tuple[float, float]
    times: tuple[float, float]
    num_tokens: int = 0


@dataclass(slots=True)
class Lane:
    """One request's spans, in order. `preemptions` are the (step, time) at which it had to give way, `hits` the (step, time,
    tokens) at which it was admitted on top of cached tokens, `end` the (step, time) of its end, None while it runs."""

    request: RequestRecord
    spans: list[Span] = field(default_factory=list)
    preemptions: list[tuple[float, float]] = field(default_factory=list)
    hits: list[tuple[float, float, int]] = field(default_factory=list)
    end: tuple[float, float] | None = None


def lanes(trace: Trace) -> list[Lane]:
    """A lane for each request, in order of arrival."""
    of_request = {request_id: Lane(request) for request_id, request in trace.requests.items()}
    for place, step in enumerate(trace.steps):
        for request_id in step.preempted:
            if (lane := of_request.get(request_id)) is not None:
                lane.preemptions.append((place, step.start))
        for request_id, tokens in step.tokens.items():
            if (lane := of_request.get(request_id)) is not None:
                kind = PREFILL if tokens.is_prefill else DECODE
                _extend(lane, trace, place, step, kind, tokens.num_tokens)
        for request_id, num_cached_tokens in step.cached_tokens.items():
            if num_cached_tokens and (lane := of_request.get(request_id)) is not None:
                lane.hits.append((place, step.start, num_cached_tokens))
        for request_id in step.finished:
            if (lane := of_request.get(request_id)) is not None:
                lane.end = (place + 1, max(step.end, lane.request.finish or 0.0))
    for lane in of_request.values():
        _finish(lane, trace)
    return sorted(of_request.values(), key=lambda lane: lane.request.arrival)


def arrival_step(trace: Trace, request: RequestRecord) -> int:
    """The first step that could have planned the request: the next to begin when it came, or the one it arrived in."""
    return next((place for place, step in enumerate(trace.steps) if step.end > request.arrival), len(trace.steps))


def _extend(lane: Lane, trace: Trace, place: int, step: StepRecord, kind: str, num_tokens: int) -> None:
    last = lane.spans[-1] if lane.spans else None
    if last is not None and last.kind == kind and last.steps[1] == place and (place, step.start) not in lane.preemptions:
        last.steps, last.times = (last.steps[0], place + 1), (last.times[0], step.end)
        last.num_tokens += num_tokens
        return
    _fill_gap(lane, trace, place, step.start)
    lane.spans.append(Span(kind, (place, place + 1), (step.start, step.end), num_tokens))


def _fill_gap(lane: Lane, trace: Trace, place: float, time: float) -> None:
    """What it did since its last span, now that it has got tokens again or is gone."""
    if not lane.spans:
        begin: tuple[float, float] = (min(arrival_step(trace, lane.request), place), lane.request.arrival)
        kind = WAITING
    else:
        begin = lane.spans[-1].steps[1], lane.spans[-1].times[1]
        kind = PREEMPTED if any(at >= begin[0] for at, _ in lane.preemptions) else IDLE
    if place > begin[0] or (kind == WAITING and time > begin[1]):
        lane.spans.append(Span(kind, (begin[0], place), (begin[1], max(time, begin[1]))))


def _finish(lane: Lane, trace: Trace) -> None:
    """The end of a lane: where the request ended, or the end of the trace."""
    if lane.end is None and lane.request.finish is not None:  # aborted before any step
        lane.end = (arrival_step(trace, lane.request), lane.request.finish)
    _fill_gap(lane, trace, *(lane.end or (len(trace.steps), trace.duration)))
