"""Lab 11, beside the student's code: runs in the child, and knows no answer. lab_11.py judges what comes back."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import gc
import inspect
import random
import selectors
import sys
import time
from collections.abc import AsyncIterator, Iterator
from types import FrameType, ModuleType
from typing import Any

from checks.exercises import Case
from checks.sandbox.plain import Opaque
from minivllm.outputs import CompletionOutput, RequestMetrics, RequestOutput

# -------------------------------------------------------------------------------------------------- 11.1 push


class TinyTokenizer:
    """A tokenizer whose tokens are a list of bytes, so that every case can be checked by hand. It has the methods of minivllm's
    that the exercise names, and counts the tokens it is asked about."""

    def __init__(self, pieces: list[str], special_ids: list[int], drops_space: bool) -> None:
        self.pieces = [bytes.fromhex(piece) for piece in pieces]
        self.special_ids = frozenset(special_ids)
        self.drops_space = drops_space
        self.vocab_size = len(pieces)
        self.num_looked_at = 0

    def token_bytes(self, token_id: int) -> bytes:
        self.num_looked_at += 1
        return self.pieces[token_id]

    def token_text(self, token_id: int, *, first: bool = False) -> str:
        text = self.token_bytes(token_id).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if first and self.drops_space else text

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        ids = [token_id for token_id in token_ids if not (skip_special_tokens and token_id in self.special_ids)]
        self.num_looked_at += len(ids)
        text = b"".join(self.pieces[token_id] for token_id in ids).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.drops_space else text


def run_push(module: ModuleType, case: Case) -> dict[str, Any]:
    """Outputs of one step each, in the order of `turns`: (which output, its token)."""
    tokenizer = TinyTokenizer(case["pieces"], case["special"], case["drops_space"])
    options = {} if case["skip_special"] else {"skip_special_tokens": False}
    outputs = [module.IncrementalDetokenizer(tokenizer, case["prompt"], **options) for _ in range(case["num_outputs"])]
    given: list[list[Any]] = [[] for _ in outputs]
    decoded = [0]
    with bytes_decoded(decoded):
        for which, token_id in case["turns"]:
            given[which].append(outputs[which].push(token_id))
    looked_at = tokenizer.num_looked_at
    return {
        "given": given,
        "rest": [output.finish() for output in outputs],
        "looked_at": looked_at,
        "decoded": decoded[0],
    }


@contextlib.contextmanager
def bytes_decoded(total: list[int]) -> Iterator[None]:
    """While it is open, total[0] grows by the length of what is decoded, by bytes.decode or by an incremental decoder."""

    def note(frame: FrameType, event: str, called: Any) -> None:
        data = None
        if event == "c_call" and getattr(called, "__name__", "") == "decode":
            data = getattr(called, "__self__", None)
        elif event == "call" and frame.f_code is codecs.BufferedIncrementalDecoder.decode.__code__:
            data = frame.f_locals.get("input")
        total[0] += len(data) if isinstance(data, (bytes, bytearray)) else 0

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


# ------------------------------------------------------------------------------------------ 11.2 open, route, leave


def _delta(request_id: str, token: int, finished: bool) -> RequestOutput:
    completion = CompletionOutput(0, f"<{token}>", [token], finish_reason="length" if finished else None)
    return RequestOutput(request_id, None, [1], [completion], finished, metrics=RequestMetrics())


async def _read(stream: Any) -> Any:
    """What the reader gets now: token ids, "nothing yet", "end", or the error."""
    reading = asyncio.ensure_future(anext(stream))
    for _ in range(3):
        await asyncio.sleep(0)
    if not reading.done():
        reading.cancel()
        await asyncio.wait({reading})
        return "nothing yet"
    if (error := reading.exception()) is not None:
        return "end" if isinstance(error, StopAsyncIteration) else f"{type(error).__name__}: {error}"
    output = reading.result()
    return [token for one in output.outputs for token in one.token_ids] if isinstance(output, RequestOutput) else output


def run_route(module: ModuleType, case: Case) -> dict[str, Any]:
    """A script of calls: ["open", id], ["route", id, token, is it the last?], ["read", id], ["close", id] (the reader leaves),
    ["drop", id] (the last reference goes), ["leave", id] (the method itself), ["fail", id or None]."""
    from minivllm.serving.async_llm import OutputStream

    aborted: list[Any] = []

    async def script() -> list[Any]:
        router = module.OutputRouter(aborted.append)
        streams: dict[str, Any] = {}
        trace: list[Any] = []
        for name, request_id, *rest in case["script"]:
            answer: dict[str, Any] = {}
            result: Any = None
            if name == "open":
                streams[request_id] = result = router.open(request_id)
                answer["is_stream"] = isinstance(result, OutputStream) or Opaque(type(result).__name__)
                result = None if isinstance(result, OutputStream) else result
            elif name == "route":
                result = router.route(request_id, _delta(request_id, *rest))
            elif name == "read":
                answer["read"] = await _read(streams[request_id])
            elif name == "close":
                result = streams[request_id].close()
            elif name == "leave":
                result = router.leave(request_id)
            elif name == "drop":
                del streams[request_id]
                gc.collect(0)  # a read that was given up may hold it in a cycle
            else:
                router.fail(RuntimeError("the engine died"), request_id)
            if inspect.iscoroutine(result):
                result.close()
                answer["is_coroutine"] = True
            trace.append({**answer, "aborted": list(aborted), "open": len(router)})
            if answer.get("is_stream", True) is not True:
                break
        return trace

    return {"trace": asyncio.run(script())}


# ------------------------------------------------------------------------------ 11.3 poisson_arrivals, open_loop, measure


class Clock:
    """Time that passes only while everybody sleeps: a minute's load is checked in a millisecond, and to the microsecond."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept = 0.0

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """time.sleep: nobody else gets on meanwhile."""
        self.now += max(0.0, seconds)
        self.slept += max(0.0, seconds)


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    clock: Clock

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("Everything waits, and nothing will ever happen: what is awaited is never done.")
        self.clock.now += max(0.0, timeout)
        return super().select(0)


@contextlib.contextmanager
def virtual_time(module: ModuleType) -> Iterator[tuple[asyncio.AbstractEventLoop, Clock]]:
    """An event loop on a Clock. `time`'s functions show it, also those that the cell has imported by name."""
    clock, selector = Clock(), _Selector()
    selector.clock = clock
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = clock.read  # type: ignore[method-assign]
    ours: dict[str, Any] = dict.fromkeys(("perf_counter", "monotonic", "time"), clock.read)
    ours["sleep"] = clock.sleep
    theirs = {name: getattr(time, name) for name in ours}
    in_cell = {key: name for key, value in vars(module).items() for name, real in theirs.items() if value is real}
    try:
        for name, function in ours.items():
            setattr(time, name, function)
        for key, name in in_cell.items():
            setattr(module, key, ours[name])
        yield loop, clock
    finally:
        for name, function in theirs.items():
            setattr(time, name, function)
        for key, name in in_cell.items():
            setattr(module, key, theirs[name])
        loop.close()


def run_load(module: ModuleType, case: Case) -> dict[str, Any]:
    return {"arrivals": run_arrivals, "loop": run_loop, "measure": run_measure}[case["kind"]](module, case)


def run_arrivals(module: ModuleType, case: Case) -> dict[str, Any]:
    seeds = (case["seed"], case["seed"], case["seed"] + 1)
    every = [module.poisson_arrivals(case["rate"], case["n"], random.Random(seed)) for seed in seeds]
    # A NumPy array or a tuple of times is as good as a list.
    first, second, third = (x.tolist() if hasattr(x, "tolist") else list(x) if isinstance(x, tuple) else x for x in every)
    return {"returned": first, "same": first == second, "other": first != third}


def run_loop(module: ModuleType, case: Case) -> dict[str, Any]:
    """The server is a table: for each request the pauses before its tokens. `busy` is how long the client's machine stands
    still when the request is sent; None among the pauses is an error."""
    sent: list[Any] = [None] * len(case["arrivals"])
    times_asked = [0] * len(case["arrivals"])
    with virtual_time(module) as (loop, clock):
        begin = clock.now

        async def ask(i: int) -> AsyncIterator[str]:
            times_asked[i] += 1
            sent[i] = clock.now - begin
            clock.now += case["busy"].get(str(i), 0.0)
            for k, pause in enumerate(case["pauses"][i]):
                if pause is None:
                    raise ConnectionError(
                        "the server hung up. (One request's error: it keeps the times that it has, and the others go on.)"
                    )
                await asyncio.sleep(pause)
                yield f"token {k}"

        arrivals = list(case["arrivals"])
        returned = module.open_loop(ask, arrivals)
        is_async = inspect.isawaitable(returned)
        if is_async:

            async def wait() -> Any:
                return await returned

            returned = loop.run_until_complete(wait())
            for task in asyncio.all_tasks(loop):  # left behind
                task.cancel()
                with contextlib.suppress(BaseException):
                    loop.run_until_complete(task)
            loop.run_until_complete(loop.shutdown_asyncgens())
    return {
        "returned": _plain(returned),
        "is_async": is_async,
        "sent": sent,
        "times_asked": times_asked,
        "slept": clock.slept,
        "arrivals_changed": arrivals != case["arrivals"],
    }


def _plain(value: Any) -> Any:
    """Tuples and lists may stand for each other."""
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def run_measure(module: ModuleType, case: Case) -> dict[str, Any]:
    requests = [(due, list(times)) for due, times in case["requests"]]
    try:
        returned = module.measure(requests, case["max_ttft"], case["max_tpot"])
    except (IndexError, ZeroDivisionError) as error:
        if not all(times for _, times in requests):
            error.args = (f"{error}. A request that failed before its first token has no times.",)
        raise
    changed = requests != [(due, list(times)) for due, times in case["requests"]]
    if isinstance(returned, dict):
        returned = {str(key): _plain(value) for key, value in returned.items()}
    return {"returned": returned, "changed": changed}


RUN = {"11.1": run_push, "11.2": run_route, "11.3": run_load}
