"""What the figures of `timeline.py` show, in words and from the same data: for readers who do not see them, and where a picture
does not render. Pure Python.
"""

from __future__ import annotations

from minivllm.bench.metrics import itl, percentile, ttft
from minivllm.observe.lanes import lanes
from minivllm.observe.trace import Trace

_FEW = 6  # requests that are named one by one


def timeline_alt_text(trace: Trace) -> str:
    """Of `plot_timeline`."""
    every = lanes(trace)
    parts = [
        f"Timeline of {_count(len(trace.requests), 'request')}, one lane each, over {_count(len(trace.steps), 'step')} and"
        f" {_ms(trace.duration)}: a lane is waiting, prefill, decode or preempted."
    ]
    if 0 < len(every) <= _FEW:
        for lane in every:
            request = lane.request
            ended = (
                f"ends with {request.finish_reason} at {_ms(request.finish)}" if request.finish is not None else "is running"
            )
            first = "has no token" if request.first_token is None else f"first token at {_ms(request.first_token)}"
            gave_way = f", preempted {_times(request.num_preemptions)}" if request.num_preemptions else ""
            hit = f", {request.num_cached_tokens} of them cached" if request.num_cached_tokens else ""
            parts.append(
                f"Request {request.request_id} ({request.num_prompt_tokens} prompt tokens{hit}) arrives at"
                f" {_ms(request.arrival)}, {first}, {ended} after {_count(request.num_output_tokens, 'token')}{gave_way}."
            )
    elif every:
        first_tokens = ttft(trace)
        if first_tokens:
            parts.append(f"Time to first token: median {_ms(percentile(first_tokens, 50))}, worst {_ms(max(first_tokens))}.")
        most = max(step.num_running for step in trace.steps) if trace.steps else 0
        parts.append(f"At most {most} run at once.")
    parts.append(_preemptions(trace))
    return " ".join(parts)


def budget_alt_text(trace: Trace) -> str:
    """Of `plot_budget`."""
    if not trace.steps:
        return "Tokens per step: there is no step."
    total = [step.num_tokens for step in trace.steps]
    prefill = sum(step.num_prefill_tokens for step in trace.steps)
    mixed = sum(0 < step.num_prefill_tokens < step.num_tokens for step in trace.steps)
    limit = trace.max_num_batched_tokens
    full = sum(n >= limit for n in total) if limit else 0
    of_limit = f" of a budget of {limit}" if limit else ""
    return (
        f"Tokens per step as bars over {_count(len(total), 'step')}: at most {max(total)}{of_limit},"
        f" {sum(total) / len(total):.1f} on average; {_count(full, 'step')} used the whole budget. {prefill} of"
        f" {sum(total)} tokens were prefill, and {_count(mixed, 'step')} mixed prefill with decodes. {_preemptions(trace)}"
    )


def block_map_alt_text(trace: Trace) -> str:
    """Of `plot_block_map`."""
    if not trace.steps:
        return "Block map: there is no step."
    usable = max(trace.num_blocks - 1, 0)
    held = [len({block for table in step.blocks.values() for block in table}) for step in trace.steps]
    fullest = max(range(len(held)), key=held.__getitem__)
    shared = [_num_shared(step.blocks) for step in trace.steps]
    evicted = sum(len(step.evicted) for step in trace.steps)
    share = f" ({held[fullest] / usable:.0%})" if usable else ""
    return (
        f"Block map: a row for each KV block, a column for each of {_count(len(held), 'step')}, coloured by the request that"
        f" holds it. At the end of step {fullest} the most are held, {held[fullest]} of {usable}{share}. At most"
        f" {max(shared)} are shared by several requests. {_count(evicted, 'cached block')} evicted. {_preemptions(trace)}"
    )


def itl_alt_text(trace: Trace) -> str:
    """Of `plot_itl`."""
    latencies, first = itl(trace), ttft(trace)
    if not latencies and not first:
        return "Token latencies: no request has ended."
    parts = [f"Latency of each token over time, for {_count(len(trace.requests), 'request')}."]
    if latencies:
        parts.append(
            f"Between tokens: median {_ms(percentile(latencies, 50))}, 99th percentile {_ms(percentile(latencies, 99))}, worst"
            f" {_ms(max(latencies))}."
        )
    if first:
        parts.append(f"First tokens: median {_ms(percentile(first, 50))}, worst {_ms(max(first))} after arrival.")
    return " ".join(parts)


def step_alt_text(trace: Trace, place: int) -> str:
    """Of one step of the scrubber."""
    step = trace.steps[place]
    names = [
        f"{request_id} {'prefills' if tokens.is_prefill else 'decodes'} {tokens.num_tokens}"
        for request_id, tokens in step.tokens.items()
    ]
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    said = f"Step {place} at {_ms(step.start)}: {', '.join(names[:_FEW]) or 'nobody computes'}{more}."
    if step.preempted:
        said += f" Preempted: {', '.join(step.preempted)}."
    if step.finished:
        said += f" Finished: {', '.join(step.finished)}."
    return f"{said} {step.num_running} running, {step.num_waiting} waiting, {_count(step.num_free_blocks, 'block')} free."


def _num_shared(blocks: dict[str, list[int]]) -> int:
    holders: dict[int, int] = {}
    for table in blocks.values():
        for block_id in table:
            holders[block_id] = holders.get(block_id, 0) + 1
    return sum(count > 1 for count in holders.values())


def _preemptions(trace: Trace) -> str:
    times = [f"{', '.join(step.preempted)} in step {place}" for place, step in enumerate(trace.steps) if step.preempted]
    if not times:
        return "Nobody was preempted."
    more = f" and {len(times) - _FEW} times more" if len(times) > _FEW else ""
    return f"Preempted: {'; '.join(times[:_FEW])}{more}."


def _ms(seconds: float | None) -> str:
    return "no time" if seconds is None else f"{seconds * 1000:.0f} ms" if abs(seconds) < 10 else f"{seconds:.1f} s"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _times(number: int) -> str:
    return "once" if number == 1 else "twice" if number == 2 else f"{number} times"
