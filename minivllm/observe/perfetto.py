"""A trace as a file for a trace viewer: ui.perfetto.dev, or chrome://tracing. Both read it locally, nothing is uploaded.

    scheduler   schedule | update               one slice a step, in the thread that did it
    worker      execute | sample
    requests    a thread each: waiting, prefill, decode, preempted; arrows where somebody had to give way
    counters    tokens in the step, free blocks, requests

Format: "Trace Event Format" (Chromium project), JSON object form; times in microseconds. Pure Python.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minivllm.observe.lanes import Lane, lanes
from minivllm.observe.trace import StepRecord, Trace

Event = dict[str, Any]

SCHEDULER, WORKER, REQUESTS = 1, 2, 3  # process ids
_PROCESSES = {SCHEDULER: "scheduler", WORKER: "worker", REQUESTS: "requests"}


def export(trace: Trace, path: str | Path) -> None:
    """Write the trace in Chrome's JSON format. Open it with ui.perfetto.dev -> "Open trace file"."""
    limits = ("model", "block_size", "num_blocks", "max_num_batched_tokens", "max_num_seqs")
    document = {
        "traceEvents": events(trace),
        "displayTimeUnit": "ms",
        "otherData": {name: str(getattr(trace, name)) for name in limits},
    }
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        json.dump(document, file, separators=(",", ":"))


def events(trace: Trace) -> list[Event]:
    """All events, names first, the others in the order of their times."""
    every = lanes(trace)
    begin = min([0.0, *(lane.request.arrival for lane in every)])  # viewers want no negative times
    timed = [*_step_events(trace), *_counter_events(trace)]
    for thread, lane in enumerate(every, 1):
        timed += _lane_events(lane, thread)
    for event in timed:
        event["ts"] = round((event["ts"] - begin) * 1e6, 3)
        if "dur" in event:
            event["dur"] = round(event["dur"] * 1e6, 3)
    # Of slices that begin together the longer one comes first: the others are inside it.
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return [*_names(every), *timed]


def _names(every: list[Lane]) -> Iterator[Event]:
    for process, name in _PROCESSES.items():
        yield _meta("process_name", process, 0, name=name)
        yield _meta("process_sort_index", process, 0, sort_index=process)
    yield _meta("thread_name", SCHEDULER, 1, name="schedule, update")
    yield _meta("thread_name", WORKER, 1, name="execute, sample")
    for thread, lane in enumerate(every, 1):
        yield _meta("thread_name", REQUESTS, thread, name=f"request {lane.request.request_id}")
        yield _meta("thread_sort_index", REQUESTS, thread, sort_index=thread)


def _meta(kind: str, process: int, thread: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}


def _step_events(trace: Trace) -> Iterator[Event]:
    for place, step in enumerate(trace.steps):
        at = step.start
        args = _step_args(place, step)
        for name, process, seconds in (
            ("schedule", SCHEDULER, step.schedule_s),
            ("execute", WORKER, step.execute_s),
            ("sample", WORKER, step.sample_s),
            ("update", SCHEDULER, step.update_s),
        ):
            if seconds > 0:
                yield {"ph": "X", "name": name, "cat": "step", "pid": process, "tid": 1, "ts": at, "dur": seconds, "args": args}
            at += seconds
        if step.error is not None:
            yield {
                "ph": "i",
                "name": "step failed",
                "s": "p",
                "pid": WORKER,
                "tid": 1,
                "ts": step.end,
                "args": {"error": step.error},
            }


def _step_args(place: int, step: StepRecord) -> dict[str, Any]:
    return {
        "step": place,
        "prefill_tokens": step.num_prefill_tokens,
        "decode_tokens": step.num_decode_tokens,
        "blocks_taken": len(step.taken),
        "blocks_freed": len(step.freed),
        "blocks_evicted": len(step.evicted),
        "tokens": {request_id: tokens.num_tokens for request_id, tokens in step.tokens.items()},
    }


def _counter_events(trace: Trace) -> Iterator[Event]:
    for step in trace.steps:
        tokens = {"prefill": step.num_prefill_tokens, "decode": step.num_decode_tokens}
        yield _counter("tokens in the step", step.start, **tokens)
        yield _counter("free blocks", step.end, blocks=step.num_free_blocks)
        yield _counter("requests", step.end, running=step.num_running, waiting=step.num_waiting)
    if trace.steps:
        yield _counter("tokens in the step", trace.steps[-1].end, prefill=0, decode=0)


def _counter(name: str, ts: float, **values: int) -> Event:
    return {"ph": "C", "name": name, "pid": SCHEDULER, "tid": 0, "ts": ts, "args": values}


def _lane_events(lane: Lane, thread: int) -> Iterator[Event]:
    where = {"cat": "request", "pid": REQUESTS, "tid": thread}
    for span in lane.spans:
        begin, end = span.times
        if end > begin:
            args = {"tokens": span.num_tokens, "steps": f"{span.steps[0]:g} to {span.steps[1]:g}"}
            yield {"ph": "X", "name": span.kind, "ts": begin, "dur": end - begin, "args": args, **where}
    request = lane.request
    for _, at in lane.preemptions:
        yield {"ph": "i", "name": "preempted", "s": "t", "ts": at, "args": {}, **where}
    for _, at, num_tokens in lane.hits:
        yield {"ph": "i", "name": "prefix hit", "s": "t", "ts": at, "args": {"tokens": num_tokens}, **where}
    if request.first_token is not None:
        yield {"ph": "i", "name": "first token", "s": "t", "ts": request.first_token, "args": {}, **where}
    if request.finish is not None:
        args = {"reason": request.finish_reason, "output_tokens": request.num_output_tokens}
        yield {"ph": "i", "name": "end", "s": "t", "ts": request.finish, "args": args, **where}
