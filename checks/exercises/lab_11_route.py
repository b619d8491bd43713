"""Exercise 11.2: each output to its own reader. Cases and judge, in the parent only."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from checks.exercises import RIGHT, Case, Verdict
from checks.exercises.words import count


def route_cases(seed: int, scale: int = 1) -> list[Case]:
    """Scripts: "+A" opens A, "A1" routes token 1 to A, "A1." token 1 as its last, "?A" reads, "-A" the reader leaves, "~A" the
    reader is dropped, "=A" leave is called by hand, "!A" A fails, "!" all fail."""
    by_hand = [
        "+A A1 ?A",
        "+A A1 ?A ?A A2 ?A",
        "+A A1 A2 A3 ?A",
        "+A A1. ?A ?A",
        "+A +B A1 B2 ?B ?A",
        "+A +B B1 ?A ?B",
        "+A A1 ?A -A",
        "+A -A -A =A",
        "+A +B -A B1 ?B",
        "+A -A A1",
        "+A A1 ~A",
        "+A A1. -A =A",
        "+A A1. ?A -A",
        "+A A1. ~A",
        "+A +B A1. B1 ?B ?A B2. ?B",
        "A1 +B B1 ?B =A",
        "+A +B A1 !A ?A ?A B1 ?B",
        "+A +B A1 B1 ! ?A ?B ?A ?B",
        "+A A1. +A ?A A2 ?A -A",
        "+A -A +A A1 ?A A2. ?A ?A",
    ]
    rng = random.Random(f"11.2:{seed}")
    return [_case(script.split()) for script in (*by_hand, *(_random_script(rng, n) for n in (20, 80 * scale)))]


def _case(words: list[str]) -> Case:
    steps = [_step(word) for word in words]
    shown = [_show_step(step) for step in steps]
    call = "; ".join(shown if len(shown) <= 8 else [*shown[:6], f"... ({count(len(steps), 'call')})"])
    return {"script": steps, "call": call}


def _step(word: str) -> list[Any]:
    names = {"+": "open", "?": "read", "-": "close", "~": "drop", "!": "fail", "=": "leave"}
    if word[0] in names:
        return [names[word[0]], word[1:] or None]
    return ["route", word[0], int(word[1:].rstrip(".")), word.endswith(".")]


def _show_step(step: list[Any]) -> str:
    name, request, *rest = step
    if name == "route":
        return f'route("{request}", token {rest[0]}{", the last" if rest[1] else ""})'
    if name == "open":
        return f'{request.lower()} = router.open("{request}")'
    if name == "leave":
        return f'router.leave("{request}")'
    if name == "fail":
        return f'fail(error, "{request}")' if request else "fail(error)"
    low = str(request).lower()
    return {"read": f"anext({low})", "close": f"{low}.close()", "drop": f"del {low}"}[name]


def _random_script(rng: random.Random, calls: int) -> str:
    words: list[str] = []
    streams: list[str] = []
    running: list[str] = []
    names = iter("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
    token = 0
    while len(words) < calls:
        token += 1
        kind = rng.random()
        if kind < 0.15 or not streams:
            if (name := next(names, None)) is None:
                break
            words.append(f"+{name}")
            streams.append(name)
            running.append(name)
        elif kind < 0.65:
            name = rng.choice(running or streams)
            last = name in running and rng.random() < 0.15
            words.append(f"{name}{token}{'.' if last else ''}")
            if last:
                running.remove(name)
        elif kind < 0.9:
            words.append(f"?{rng.choice(streams)}")
        else:
            name = rng.choice(streams)
            drop = rng.random() < 0.5
            words.append(f"{'~' if drop else '-'}{name}")
            streams.remove(name)
            if name in running:
                running.remove(name)
    return " ".join(words)


@dataclass
class _Reader:
    unread: list[int] = field(default_factory=list)
    is_over: bool = False
    error: str | None = None


@dataclass
class _Ledger:
    """What should be: who is open, what each reader has not read, who was aborted."""

    open: dict[str, _Reader] = field(default_factory=dict)
    readers: dict[str, _Reader] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    routed: dict[int, str] = field(default_factory=dict)

    def apply(self, step: list[Any]) -> Any:
        """What a read gives."""
        name, request, *rest = step
        if name == "open":
            self.open[request] = self.readers[request] = _Reader()
        elif name == "route":
            self.routed[rest[0]] = request
            if (reader := self.open.get(request)) is not None:
                reader.unread.append(rest[0])
                if rest[1]:
                    reader.is_over = True
                    del self.open[request]
        elif name == "read":
            reader = self.readers[request]
            if reader.unread:
                unread, reader.unread = reader.unread, []
                return unread
            return reader.error or ("end" if reader.is_over else "nothing yet")
        elif name == "fail":
            for key in [request] if request else list(self.open):
                reader = self.open.pop(key)
                reader.is_over, reader.error = True, "RuntimeError: the engine died"
        elif name == "leave":
            if self.open.pop(request, None) is not None:
                self.aborted.append(request)
        else:
            reader = self.readers[request]
            if self.open.get(request) is reader:
                del self.open[request]
                self.aborted.append(request)
            reader.is_over = True
        return None


def judge_route(case: Case, output: Any) -> Verdict:
    ledger = _Ledger()
    for number, (step, answer) in enumerate(zip(case["script"], output["trace"], strict=False), start=1):
        wanted = ledger.apply(step)
        if wrong := _judge_call(ledger, step, answer, wanted):
            return Verdict(wrong.category, f"Call {number}, {_show_step(step)}: {wrong.message}")
    return RIGHT


def _judge_call(ledger: _Ledger, step: list[Any], answer: dict[str, Any], wanted: Any) -> Verdict | None:
    name = step[0]
    if answer.get("is_coroutine"):
        told = f"{name} is an `async def`, and is called without await, so nothing of it ran. Nothing in it waits: plain `def`."
        return Verdict("wrong type", told)
    if answer.get("is_stream", True) is not True:
        told = f"it should return an OutputStream for the reader, and returned {str(answer['is_stream']).removeprefix('a ')}."
        return Verdict("wrong type", told)
    if name == "read" and answer["read"] != wanted:
        return Verdict("wrong value", _why_read(ledger, step, answer["read"], wanted))
    if answer["aborted"] != ledger.aborted:
        return Verdict("wrong calls", _why_aborted(ledger, step, answer["aborted"]))
    if answer["open"] != len(ledger.open):
        return Verdict("wrong value", _why_open(ledger, step, answer["open"]))
    return None


def _why_read(ledger: _Ledger, step: list[Any], got: Any, wanted: Any) -> str:
    request = step[1]
    told = f"reader {request} got {_shown(got)}, and should get {_shown(wanted)}."
    if isinstance(got, list):
        if strangers := [token for token in got if ledger.routed.get(token) != request]:
            return f"{told} Token {strangers[0]} was {ledger.routed.get(strangers[0])}'s: each request has a queue of its own."
        if isinstance(wanted, list) and set(got) < set(wanted):
            return f"{told} Something was lost: what nobody has read yet waits in the queue."
    if wanted == "end":
        return f"{told} The last output (`finished`) ends the stream."
    if isinstance(wanted, list):
        if ledger.readers[request].is_over:
            return f"{told} The last output has to reach its reader, too: first put it, then forget the queue."
        return f"{told} What is routed goes into the queue that the stream reads from."
    return told


def _shown(read: Any) -> str:
    if isinstance(read, list):
        return f"the tokens {read}"
    return f"{read!r}" if isinstance(read, str) else str(read)


def _why_aborted(ledger: _Ledger, step: list[Any], got: list[Any]) -> str:
    if len(got) < len(ledger.aborted):
        return (
            f"nobody was told. The reader has left and {ledger.aborted[-1]} still runs: abort({ledger.aborted[-1]!r}), or the"
            " engine computes to its end for nobody, and its blocks stay taken."
        )
    extra = got[len(ledger.aborted)] if len(got) > len(ledger.aborted) else got[-1]
    if not isinstance(extra, str):
        return f"abort was called with {extra!r}; it takes the request's id."
    if step[0] == "route":
        if step[3]:
            return f"abort({extra!r}) was called, but the request has ended by itself: there is nothing left to abort."
        return f"abort({extra!r}) was called. An output that comes for nobody is only dropped: its abort is under way."
    if step[0] == "leave":
        told = "it has left already" if extra in ledger.aborted else "it has ended by itself, or never was"
        return f"abort({extra!r}) was called, but {told}. leave looks into self.queues first: who is not there needs no abort."
    if extra in ledger.aborted:
        return f"abort({extra!r}) was called a second time. A request ends once."
    if step[0] in ("close", "drop") and extra == step[1]:
        return f"abort({extra!r}) was called, but that request had ended by itself: there is nothing left to abort."
    return f"abort was called with {extra!r}; nobody's reader has left here."


def _why_open(ledger: _Ledger, step: list[Any], got: int) -> str:
    wanted = len(ledger.open)
    told = (
        f"afterwards {count(got, 'queue')} {'is' if got == 1 else 'are'} left in the router, and should be {wanted or 'none'}."
    )
    if got > wanted:
        if step[0] == "route" and len(step) > 3 and step[3]:
            return (
                f"{told} After the last output nothing comes any more: forget the queue, or a server's memory grows for ever."
            )
        if step[0] == "route":
            return f"{told} Nobody waits for this request: make no queue for it."
        return f"{told} The reader has left, so its queue goes."
    return f"{told} The request still runs, and its reader waits."
