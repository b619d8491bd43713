"""What a user feels and an operator pays for, computed from a Trace. Used by the labs from 05 on. Pure Python.

    arrival      first token                    last token
       |-- TTFT --|-- ITL --|-- ITL --|-- ITL --|                TPOT = mean ITL of a request
       |----------------- e2e ------------------|

Each function takes a Trace, or some of its requests: `ttft(select(trace, turn=1))`. Times are seconds. Requests that were
aborted or failed are left out of the latencies, and count as missed in `goodput`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from minivllm.observe.trace import RequestRecord, Trace

Requests = Trace | Iterable[RequestRecord]
_SERVED = ("stop", "length")


def select(trace: Trace, *, group: str | None = None, turn: int | None = None) -> list[RequestRecord]:
    """The requests of a group of the workload, or of a turn, or of both."""
    return [
        request
        for request in trace.requests.values()
        if (group is None or request.group == group) and (turn is None or request.turn == turn)
    ]


def served(requests: Requests) -> list[RequestRecord]:
    """Those that ended by themselves."""
    every = requests.requests.values() if isinstance(requests, Trace) else requests
    return [request for request in every if request.finish_reason in _SERVED]


# ---------------------------------------------------------------------- latencies, one number a request (ITL: a token)


def ttft(requests: Requests) -> list[float]:
    """Time to first token."""
    return [request.ttft for request in served(requests) if request.ttft is not None]


def tpot(requests: Requests) -> list[float]:
    """Time per output token after the first. Requests of one token have none."""
    return [request.tpot for request in served(requests) if request.tpot is not None]


def itl(requests: Requests) -> list[float]:
    """Inter-token latencies of all requests together. TPOT is a mean over them: a stall shows here that a mean hides."""
    return [latency for request in served(requests) for latency in request.itl]


def e2e(requests: Requests) -> list[float]:
    """From arrival to the end."""
    return [request.e2e for request in served(requests) if request.e2e is not None]


def percentile(values: Iterable[float], p: float) -> float:
    """The value below which p percent lie, between two neighbours in proportion (NumPy's default). NaN of no values."""
    if not 0 <= p <= 100:
        raise ValueError(f"p must be between 0 and 100, got {p}.")
    ordered = sorted(values)
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * p / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Summary:
    """A distribution in five numbers; NaN where there was nothing."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    def __str__(self) -> str:
        return f"mean {self.mean:.4g}, p50 {self.p50:.4g}, p90 {self.p90:.4g}, p99 {self.p99:.4g}, max {self.max:.4g}"


def summarize(values: Iterable[float]) -> Summary:
    values = list(values)
    mean = sum(values) / len(values) if values else math.nan
    p50, p90, p99 = (percentile(values, p) for p in (50, 90, 99))
    return Summary(mean, p50, p90, p99, max(values, default=math.nan))


# ---------------------------------------------------------------------- a whole run


@dataclass(frozen=True)
class Goodput:
    """Requests that met every objective: how many of how many, their share, and per second of the run."""

    num_good: int
    num_requests: int
    share: float
    per_second: float


def goodput(trace: Trace, *, ttft: float | None = None, tpot: float | None = None, e2e: float | None = None) -> Goodput:
    """Goodput under a service level objective: at least one of the limits, in seconds. Throughput counts tokens nobody waited
    for any more; this counts requests that were answered in time (the measure of DistServe, Zhong et al., 2024).

    A request of one output token has no TPOT and meets any."""
    limits = {"ttft": ttft, "tpot": tpot, "e2e": e2e}
    if all(limit is None for limit in limits.values()):
        raise ValueError("goodput() needs an objective: at least one of ttft=, tpot= and e2e=, in seconds.")
    if bad := [name for name, limit in limits.items() if limit is not None and not limit > 0]:
        raise ValueError(f"{bad[0]} must be a positive number of seconds, got {limits[bad[0]]!r}.")

    def is_good(request: RequestRecord) -> bool:
        got = {name: getattr(request, name) for name in limits}
        return all(limit is None or got[name] is None or got[name] <= limit for name, limit in limits.items())

    num_good = sum(map(is_good, served(trace)))
    num_requests, seconds = len(trace.requests), duration(trace)
    return Goodput(
        num_good,
        num_requests,
        share=num_good / num_requests if num_requests else math.nan,
        per_second=num_good / seconds if seconds else math.nan,
    )


def duration(trace: Trace) -> float:
    """Seconds from the first arrival to the last thing that happened."""
    return trace.duration - min((request.arrival for request in trace.requests.values()), default=0.0)


def output_throughput(trace: Trace) -> float:
    """Output tokens a second."""
    seconds = duration(trace)
    return sum(request.num_output_tokens for request in trace.requests.values()) / seconds if seconds else math.nan


def cache_hit_rate(requests: Requests) -> float:
    """Share of prompt tokens that the prefix cache had when their request was first admitted. Requests that were never admitted
    count with nothing found."""
    every = list(requests.requests.values() if isinstance(requests, Trace) else requests)
    num_prompt_tokens = sum(request.num_prompt_tokens for request in every)
    return sum(request.num_cached_tokens for request in every) / num_prompt_tokens if num_prompt_tokens else math.nan


def num_preemptions(trace: Trace) -> int:
    return sum(len(step.preempted) for step in trace.steps)


def num_recomputed_tokens(trace: Trace) -> int:
    """Tokens computed more than once: what preemptions cost beside the waiting."""
    furthest: dict[str, int] = {}
    total = 0
    for step in trace.steps:
        for request_id, tokens in step.tokens.items():
            begin, end = tokens.num_computed, tokens.num_computed + tokens.num_tokens
            known = furthest.get(request_id, 0)
            total += max(0, min(end, known) - begin)
            furthest[request_id] = max(known, end - tokens.num_drafts + tokens.num_accepted)
    return total


def describe(trace: Trace) -> str:
    """The run in a few lines, for a terminal or a notebook."""
    lines = [
        f"{len(trace.requests)} requests in {duration(trace):.3f} s, {len(trace.steps)} steps,"
        f" {output_throughput(trace):.1f} output tok/s, cache hit rate {cache_hit_rate(trace):.1%},"
        f" {num_preemptions(trace)} preemptions"
    ]
    for name, values in (("TTFT", ttft(trace)), ("TPOT", tpot(trace)), ("ITL", itl(trace)), ("e2e", e2e(trace))):
        if values:
            lines.append(f"{name:5} {summarize([value * 1000 for value in values])} ms")
    return "\n".join(lines)
