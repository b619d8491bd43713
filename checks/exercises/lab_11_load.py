"""Exercise 11.3: a load that does not wait for answers, and what is measured of it. Cases and judge, in the parent only."""

from __future__ import annotations

import math
import random
from itertools import accumulate, pairwise
from typing import Any

from checks.exercises import RIGHT, Case, Verdict
from checks.exercises.words import count, kind_of

Pauses = list[float | None]  # before a request's tokens; None is an error
N_DRAWS = 20_000
MANY = 300  # more requests than a client's usual pool of connections has (100), or a scheduler's batch (256)
FEW = 4  # requests under way when one is late: then it is no chain of one after the other
CLOSE = 1e-6


def load_cases(seed: int, scale: int = 1) -> list[Case]:
    rng = random.Random(f"11.3:{seed}")
    return [*_arrival_cases(rng), *_loop_cases(rng), *_measure_cases(rng, scale)]


def judge_load(case: Case, output: Any) -> Verdict:
    judges = {"arrivals": _judge_arrivals, "loop": _judge_loop, "measure": _judge_measure}
    return judges[case["kind"]](case, output)


# ------------------------------------------------------------------------------------------------------ poisson_arrivals


def _arrival_cases(rng: random.Random) -> list[Case]:
    cases = []
    for rate, n in ((2.0, 3), (0.5, 1), (4.0, 0), (1.0, N_DRAWS), (25.0, N_DRAWS)):
        seed = rng.randrange(1000)
        call = f"poisson_arrivals({rate:g}, {n}, random.Random({seed}))"
        cases.append({"kind": "arrivals", "rate": rate, "n": n, "seed": seed, "call": call})
    return cases


def _judge_arrivals(case: Case, output: Any) -> Verdict:
    times, n, rate = output["returned"], case["n"], case["rate"]
    if times is None:
        return Verdict("wrong type", "It returned None. Is a `return` missing?")
    if not isinstance(times, list):
        return Verdict("wrong type", f"It should return a list of times, and returned {_shown(times)}.")
    if not all(type(t) in (int, float) and math.isfinite(t) for t in times):
        strange = next(t for t in times if type(t) not in (int, float) or not math.isfinite(t))
        return Verdict("wrong type", f"Times are numbers of seconds; there is {_shown(strange)}.")
    if len(times) != n:
        return Verdict("wrong value", f"It returned {count(len(times), 'time')}, and should return {n}.")
    if not n:
        return RIGHT
    if not output["same"]:
        return Verdict("wrong value", "The same seed gave other times. Draw from `rng` alone, or no run can be repeated.")
    gaps = [b - a for a, b in pairwise([0.0, *times])]
    if min(gaps) < 0:
        told = "The times should grow; they are seconds since the start, not the pauses between them. Add the pauses up."
        return Verdict("wrong value", told)
    if not output["other"]:
        return Verdict("wrong value", "Another seed gave the same times: nothing is drawn from `rng`.")
    return RIGHT if n < N_DRAWS else _judge_distribution(gaps, rate)


def _judge_distribution(gaps: list[float], rate: float) -> Verdict:
    mean = sum(gaps) / len(gaps)
    if not 0.95 < mean * rate < 1.05:
        told = f"{rate:g} requests a second have {1 / rate:g} s between them on average; here it is {mean:.4g} s."
        if 0.95 < mean / rate < 1.05:
            told += " rng.expovariate takes the rate, not the mean."
        return Verdict("wrong value", told)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    if spread < 0.05 * mean:
        told = "Requests come at equal distances. People do not: a Poisson process has short pauses and long ones."
        return Verdict("wrong value", told)
    short = sum(gap < mean / 2 for gap in gaps) / len(gaps)
    if not (0.93 < spread / mean < 1.07 and abs(short - (1 - math.exp(-0.5))) < 0.03):
        told = (
            f"The mean pause is right, but pauses are not exponentially distributed: {short:.0%} of them are shorter than half"
            " the mean, and 39% should be. Nobody knows when the last request came: that is what makes a load random."
        )
        return Verdict("wrong value", told)
    return RIGHT


# ------------------------------------------------------------------------------------------------------------- open_loop


def _loop_cases(rng: random.Random) -> list[Case]:
    slow: Pauses = [2.0, 0.5, 0.5]
    cases = [
        _loop_case([0.5], [[0.25, 0.125]]),
        _loop_case([0.0, 0.25], [slow, [0.5]]),
        _loop_case([0.0, 1.0, 1.5], [slow, slow, slow]),
        _loop_case([0.25, 0.5], [[4.0], [0.25, 0.25]]),
        _loop_case([0.0, 0.0, 0.0], [[0.25], [0.5], [0.125]]),
        _loop_case([0.0, 0.25, 0.5], [[1.0], [1.0], [1.0]], busy={0: 0.75}),
        _loop_case([0.0, 0.5], [[0.25, None], [0.25, 0.25]]),
        _loop_case([0.25, 0.5], [[None], [0.25]]),
        _loop_case([], []),
    ]
    arrivals = list(accumulate(rng.expovariate(400) for _ in range(MANY)))  # under way all at once, for a while
    pauses: list[Pauses] = [[rng.uniform(1, 4), *(rng.uniform(0.01, 0.1) for _ in range(rng.randrange(6)))] for _ in arrivals]
    return [*cases, _loop_case(arrivals, pauses)]


def _loop_case(arrivals: list[float], pauses: list[Pauses], busy: dict[int, float] | None = None) -> Case:
    if len(arrivals) > 4:
        call = f"open_loop(ask, arrivals) with {count(len(arrivals), 'request')}"
    else:
        call = f"open_loop(ask, {arrivals}), where the pauses before the tokens are {pauses} (None: an error)"
    if busy:
        call += f"; the client's machine stands still for {next(iter(busy.values()))} s when request 0 is sent"
    return {
        "kind": "loop",
        "arrivals": arrivals,
        "pauses": pauses,
        "busy": {str(i): s for i, s in (busy or {}).items()},
        "call": call,
    }


def _sent_and_times(case: Case) -> tuple[list[float], list[list[float]]]:
    """When each request is sent at best, and when its tokens come then."""
    busy = case["busy"].get("0", 0.0)
    sent, times = [], []
    for i, (due, pauses) in enumerate(zip(case["arrivals"], case["pauses"], strict=True)):
        at = due if i == 0 or due >= case["arrivals"][0] + busy else case["arrivals"][0] + busy
        sent.append(at)
        kept = pauses[: pauses.index(None)] if None in pauses else pauses
        times.append(list(accumulate(kept, initial=at + (busy if i == 0 else 0.0)))[1:])
    return sent, times


def _judge_loop(case: Case, output: Any) -> Verdict:
    sent, times = _sent_and_times(case)
    if output["slept"]:
        told = (
            "time.sleep stops the whole event loop, everybody's requests with it. `await asyncio.sleep(...)` lets them go on."
        )
        return Verdict("wrong calls", told)
    if wrong := _judge_sent(case, output, sent):
        return wrong
    returned = output["returned"]
    if not output["is_async"]:
        return Verdict("wrong type", "open_loop has to be an `async def`: it is awaited.")
    n = len(sent)
    if not isinstance(returned, list) or len(returned) != n:
        shown = count(len(returned), "item") if isinstance(returned, list) else _shown(returned)
        return Verdict(
            "wrong type",
            f"It should return a list with one (due, times) for each of the {count(n, 'request')}, and returned {shown}.",
        )
    for i, item in enumerate(returned):
        if not isinstance(item, list) or len(item) != 2 or not isinstance(item[1], list):
            return Verdict("wrong type", f"Request {i}: it should be (due, times), and is {_shown(item)}.")
        if wrong := _judge_times(case, i, item, sent, times):
            return wrong
    if output["arrivals_changed"]:
        return Verdict("input changed", "The result is right, but the list `arrivals` was changed. Only read it.")
    return RIGHT


_NEVER = "`async for` over ask(i) sends it; and open_loop has to await every task that it starts, or nobody will."


def _judge_sent(case: Case, output: Any, wanted: list[float]) -> Verdict | None:
    ends = list(zip(*_sent_and_times(case), strict=True))
    for i, (got, at, due) in enumerate(zip(output["sent"], wanted, case["arrivals"], strict=True)):
        if got is None:
            return Verdict("wrong calls", f"Request {i} was never sent. {_NEVER}")
        if output["times_asked"][i] > 1:
            return Verdict("wrong calls", f"Request {i} was sent {output['times_asked'][i]} times.")
        if got > at + CLOSE:
            told = f"Request {i} was due after {due:g} s and was sent after {got:g} s."
            if len(case["arrivals"]) < MANY and math.isclose(got, sum(case["arrivals"][: i + 1])):
                return Verdict(
                    "wrong value", f"{told} Arrivals are seconds since the start, not pauses to be slept one by one."
                )
            if (under_way := sum(sent <= at < times[-1] for sent, times in ends[:i] if times)) >= FEW:
                told += f" {under_way} were under way, and it waited until one of them had ended: is there a limit on requests"
                told += " at a time (a semaphore, a pool, batches)? How many are computed at once is the server's choice. A"
                return Verdict("wrong value", f"{told} client that holds requests back hides the queue.")
            return Verdict(
                "wrong value",
                f"{told} Who waits for an answer before sending the next has a closed loop: when the server is slow it asks"
                " less, and the queue never shows. Does each request have a task of its own, that sleeps until it is due?",
            )
        if got < at - CLOSE:
            told = f"Request {i} was due after {due:g} s and was sent after {got:g} s already. Sleep until it is due."
            return Verdict("wrong value", f"{told} (Arrivals are seconds since the start, not pauses.)")
    return None


def _judge_times(case: Case, i: int, item: list[Any], sent: list[float], times: list[list[float]]) -> Verdict | None:
    due, got = item
    numbers = [due, *got]
    if not all(type(t) in (int, float) for t in numbers):
        strange = next(t for t in numbers if type(t) not in (int, float))
        return Verdict("wrong type", f"Request {i}: times are numbers, and there is {_shown(strange)}.")
    if not _close(due, case["arrivals"][i]):
        told = f"Request {i}: due is {due:g}, and should be {case['arrivals'][i]:g}, its arrival."
        if _close(due, sent[i]):
            told += (
                " That is when it was sent. The client was late, and its user waited from the moment he asked: who counts from"
                " the sending leaves out the wait (coordinated omission)."
            )
        elif any(_close(due, other) for other in case["arrivals"]):
            told += " Results stand in the order of the requests, not of their ends."
        return Verdict("wrong value", told)
    if len(got) != len(times[i]):
        told = f"Request {i}: {count(len(got), 'time')}, and {count(len(times[i]), 'token')} came."
        if None in case["pauses"][i]:
            told += " One that fails keeps the times that it has, and the others go on."
        return Verdict("wrong value", told)
    for k, (a, b) in enumerate(zip(got, times[i], strict=True)):
        if not _close(a, b):
            told = f"Request {i}: token {k} came after {b:g} s, and its time is {a:g}."
            if a > 900:
                told += " Times are seconds since open_loop began: take the clock's reading at the start off."
            elif _close(a, b - sent[i]) or _close(a, b - case["arrivals"][i]):
                told += " That is since the request was sent. All times count from the start of the load, as arrivals do."
            return Verdict("wrong value", told)
    return None


def _close(a: float, b: float) -> bool:
    return abs(a - b) < CLOSE


# --------------------------------------------------------------------------------------------------------------- measure


def _measure_cases(rng: random.Random, scale: int) -> list[Case]:
    cases = [
        _measure_case([(0.0, [0.5, 0.75, 1.0])], 1.0, 0.5),
        _measure_case([(1.0, [1.5, 1.625, 2.0, 2.5])], 1.0, 0.5),
        _measure_case([(0.0, [0.5])], 1.0, 0.1),
        _measure_case([(0.0, [0.5, 1.0]), (0.5, [2.5, 2.75, 3.0])], 1.0, 0.5),
        _measure_case([(0.0, [0.5, 1.5, 2.5]), (0.5, [1.0, 1.25])], 1.0, 0.5),
        _measure_case([(0.0, [1.0, 1.5])], 1.0, 0.5),
        _measure_case([(0.0, [0.5, 0.625, 1.5, 1.625])], 1.0, 0.5),
        _measure_case([(0.0, []), (0.25, [0.5, 0.75])], 1.0, 0.5),
        _measure_case([(0.5, [0.75, 4.0]), (1.0, [1.25, 1.5])], 1.0, 4.0),
        _measure_case([(0.0, [])], 1.0, 0.5),
    ]
    requests = []
    for due in accumulate(rng.expovariate(4) for _ in range(30 * scale)):
        first = due + rng.uniform(0.1, 2)
        gaps = [rng.uniform(0.01, 0.3) for _ in range(rng.randrange(1, 8))]
        requests.append((due, list(accumulate(gaps, initial=first)) if rng.random() < 0.9 else []))
    return [*cases, _measure_case(requests, 1.0, 0.15)]


def _measure_case(requests: list[tuple[float, list[float]]], max_ttft: float, max_tpot: float) -> Case:
    shown = f"{requests}" if len(requests) <= 2 else f"[... {count(len(requests), 'request')}]"
    call = f"measure({shown}, max_ttft={max_ttft:g}, max_tpot={max_tpot:g})"
    return {
        "kind": "measure",
        "requests": [[d, t] for d, t in requests],
        "max_ttft": max_ttft,
        "max_tpot": max_tpot,
        "call": call,
    }


def _measured(case: Case) -> dict[str, Any]:
    ttft, tpot, itl, good = [], [], [], 0
    for due, times in case["requests"]:
        if not times:
            continue
        ttft.append(times[0] - due)
        gaps = [b - a for a, b in pairwise(times)]
        itl += gaps
        tpot += [sum(gaps) / len(gaps)] if gaps else []
        good += ttft[-1] <= case["max_ttft"] and (not gaps or tpot[-1] <= case["max_tpot"])
    last = max((times[-1] for _, times in case["requests"] if times), default=None)
    seconds = last - min(due for due, _ in case["requests"]) if last is not None else 0.0
    return {
        "ttft": ttft,
        "tpot": tpot,
        "itl": itl,
        "goodput": good / seconds if seconds else 0.0,
        "good": good,
        "seconds": seconds,
    }


def _judge_measure(case: Case, output: Any) -> Verdict:
    got, wanted = output["returned"], _measured(case)
    names = ("ttft", "tpot", "itl", "goodput")
    if not isinstance(got, dict) or set(got) != set(names):
        shown = f"the keys {sorted(got)}" if isinstance(got, dict) else _shown(got)
        return Verdict(
            "wrong type",
            f'It should return {{"ttft": [...], "tpot": [...], "itl": [...], "goodput": ...}}, and returned {shown}.',
        )
    for name in names[:3]:
        if not isinstance(got[name], list) or not all(type(x) in (int, float) for x in got[name]):
            return Verdict("wrong type", f"{name} should be a list of numbers, and is {_shown(got[name])}.")
        if len(got[name]) != len(wanted[name]):
            return Verdict(
                "wrong value",
                f"{name} has {count(len(got[name]), 'number')}, and should have {len(wanted[name])}. {_WHO[name]}",
            )
        for a, b in zip(sorted(got[name]), sorted(wanted[name]), strict=True):
            if not _close(a, b):
                return Verdict("wrong value", f"{name}: there is {a:g} where {b:g} should be. {_WHAT[name]}")
    value = got["goodput"]
    if type(value) not in (int, float):
        return Verdict("wrong type", f"goodput should be a number, and is {_shown(value)}.")
    if not _close(value, wanted["goodput"]):
        return Verdict("wrong value", _why_goodput(case, value, wanted))
    if output["changed"]:
        return Verdict("input changed", "The numbers are right, but `requests` was changed. Only read it.")
    return RIGHT


_WHO = {
    "ttft": "One for each request that got a token.",
    "tpot": "One for each request with two tokens or more: a single token has nothing after it.",
    "itl": "One for each two tokens of a request that follow each other, of all requests together.",
}
_WHAT = {
    "ttft": "Time to first token: from when the request was due to its first token.",
    "tpot": "Time per output token: from a request's first token to its last, divided by the tokens after the first.",
    "itl": "Inter-token latency: from a token of a request to the next.",
}


def _why_goodput(case: Case, value: float, wanted: dict[str, Any]) -> str:
    n, good, seconds = len(case["requests"]), wanted["good"], wanted["seconds"]
    told = f"goodput is {value:.4g}, and should be {wanted['goodput']:.4g}:"
    told += f" {count(good, 'request')} met both limits in {seconds:g} s (first arrival to last token)."
    if _close(value, good):
        return f"{told} goodput is good requests a second: divide their number by the seconds."
    if n and _close(value, good / n):
        return f"{told} That is a share; goodput is good requests a second."
    last = max((times[-1] for _, times in case["requests"] if times), default=0.0)
    if last and _close(value, good / last):
        return f"{told} The load began with the first arrival, not at 0."
    if seconds and _close(value, round(value * seconds) / seconds):
        given = round(value * seconds)
        if given > good:
            return f"{told} You counted {given}: a request is good if its TTFT *and* its TPOT are within their limits."
        return f"{told} You counted {given}. A value just at its limit meets it; a request of one token has no TPOT to miss."
    return told


def _shown(value: Any) -> str:
    return "None" if value is None else kind_of(value)
