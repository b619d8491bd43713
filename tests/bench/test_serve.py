"""`minivllm bench serve`: what it reports is what happened, on servers of which that is known."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from minivllm.bench import metrics, serve
from minivllm.bench.http_stream import HttpError, post_events
from minivllm.bench.workloads import Workload, WorkloadRequest

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]
OK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(piece: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": piece, "finish_reason": finish}])


def used(n: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": n})


DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def server(answer: Callable[[dict], AsyncIterator[bytes]], headers: bytes = OK) -> AsyncIterator[str]:
    """A server that answers a request's body with chunks."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        body = json.loads(await reader.readexactly(length))
        writer.write(headers)
        async for data in answer(body):
            writer.write(chunk(data) if headers is OK else data)
            await writer.drain()
        writer.write(b"0\r\n\r\n" if headers is OK else b"")
        writer.close()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


def workload(n: int, **fields: object) -> Workload:
    return Workload("test", 0, [WorkloadRequest(None, [1, 2, 3], 4, group=f"{i}", **fields) for i in range(n)])  # type: ignore[arg-type]


# ---------------------------------------------------------------- the client


def test_events_are_found_wherever_the_chunks_are_cut() -> None:
    async def test() -> None:
        data = text("naïve") + b": a comment\n\n" + text("b") + DONE

        async def bytewise(body: dict) -> AsyncIterator[bytes]:
            for i in range(len(data)):
                yield data[i : i + 1]

        async with server(bytewise) as url:
            events = [e async for e in post_events(f"{url}/v1/completions", {"x": 1})]
            assert [e["choices"][0]["text"] for e in events] == ["naïve", "b"]

    asyncio.run(test())


@pytest.mark.parametrize(
    ("headers", "data", "words"),
    [
        (b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\n", b"wait", "HTTP 429: wait"),
        (b"HTTP/1.1 200 OK\r\n\r\n", text("a"), "cut off"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", b"", "closed in the middle"),
        (b"SSH-2.0-OpenSSH\r\n", b"", "not HTTP"),
    ],
)
def test_an_answer_that_is_none_is_an_error(headers: bytes, data: bytes, words: str) -> None:
    async def test() -> None:
        async def answer(body: dict) -> AsyncIterator[bytes]:
            yield data

        async with server(answer, headers) as url:
            with pytest.raises(HttpError, match=words):
                async for _ in post_events(url, {}):
                    pass

    asyncio.run(test())


# ---------------------------------------------------------------- the load


def test_a_closed_loop_never_has_more_requests_open_than_clients() -> None:
    most = now = 0

    async def answer(body: dict) -> AsyncIterator[bytes]:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        yield text("a", "length") + used(1) + DONE
        now -= 1

    async def test() -> None:
        async with server(answer) as url:
            run = await serve.run_load(serve.Target(url, "m"), workload(12), max_concurrency=3)
            assert most == 3 and len(metrics.served(run.trace)) == 12

    asyncio.run(test())


def test_an_open_loop_sends_when_requests_are_due_and_counts_from_then() -> None:
    """The server answers nobody before all six are there: clients that waited for answers would wait for ever."""
    arrived: list[int] = []

    async def answer(body: dict) -> AsyncIterator[bytes]:
        arrived.append(1)
        while len(arrived) < 6:
            await asyncio.sleep(0.001)
        yield text("a") + text("b", "length") + used(2) + DONE

    async def test() -> None:
        work = workload(6)
        for i, request in enumerate(work.requests):
            request.arrival_s = 0.01 * i
        async with server(answer) as url:
            run = await serve.run_load(serve.Target(url, "m"), work, request_rate=100)
        records = list(run.trace.requests.values())
        assert [round(record.arrival, 3) for record in sorted(records, key=lambda r: r.arrival)] == [0.01 * i for i in range(6)]
        assert max(metrics.ttft(run.trace)) >= 0.05

    asyncio.run(test())


def test_a_turn_is_sent_after_the_turn_before_it_was_answered() -> None:
    order: list[str] = []

    async def answer(body: dict) -> AsyncIterator[bytes]:
        order.append(f"begin {body['prompt']}")
        await asyncio.sleep(0.01)
        order.append(f"end {body['prompt']}")
        yield text("a", "length") + used(1) + DONE

    async def test() -> None:
        turns = [WorkloadRequest(name, None, 4, group="g", turn=turn) for name, turn in (("a", 0), ("b", 0), ("c", 1))]
        async with server(answer) as url:
            await serve.run_load(serve.Target(url, "m"), Workload("test", 0, turns), max_concurrency=8)
        assert order.index("begin c") > max(order.index("end a"), order.index("end b"))

    asyncio.run(test())


def test_tokens_that_come_in_one_chunk_are_counted_by_the_usage() -> None:
    async def answer(body: dict) -> AsyncIterator[bytes]:
        yield text("ab")
        await asyncio.sleep(0.02)
        yield text("cd", "length") + used(4) + DONE

    async def test() -> None:
        async with server(answer) as url:
            run = await serve.run_load(serve.Target(url, "m"), workload(1), max_concurrency=1)
        (record,) = run.trace.requests.values()
        first, last = record.token_times[0], record.token_times[-1]
        assert record.token_times == [first, first, last, last] and last - first >= 0.02
        assert record.num_prompt_tokens == 5

    asyncio.run(test())


def test_failures_are_counted_and_are_no_latencies() -> None:
    async def answer(body: dict) -> AsyncIterator[bytes]:
        yield event(error={"message": "out of luck"})

    async def test() -> None:
        async with server(answer) as url:
            run = await serve.run_load(serve.Target(url, "m"), workload(3), max_concurrency=3)
        result = run.result({"ttft": 1.0})
        assert (result["num_requests"], result["num_served"], len(run.errors)) == (3, 0, 3)
        assert "out of luck" in run.errors[0]
        assert result["goodput"]["num_good"] == 0 and math.isnan(result["ttft_ms"]["p50"])

    asyncio.run(test())


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--request-rate", "1", "--max-concurrency", "1"], "give one of them"),
        (["--request-rate", "fast"], "numbers"),
        (["--max-concurrency", "0"], "above 0"),
        (["--slo", "speed:1"], "knows ttft, tpot and e2e"),
        (["--slo", "ttft:soon"], "milliseconds"),
        (["--num-prompts", "0"], "at least 1"),
    ],
)
def test_a_wrong_command_line_is_refused(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        serve.main(argv)
    assert refused.value.code == 2 and words in capsys.readouterr().err


def test_a_server_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--base-url", "http://127.0.0.1:1"]) == 1
    assert "http://127.0.0.1:1 does not answer" in capsys.readouterr().err


def test_a_sweep_is_a_table_a_file_and_a_drawing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fastapi")
    from tests.serving.harness import serving

    with serving("echo:1", "--max-num-seqs", "8") as ours:
        files = ["--json", str(tmp_path / "result.json"), "--plot", str(tmp_path / "plot.png")]
        sizes = ["--num-prompts", "6", "--input-len", "20", "--output-len", "5", "--vocab-size", "200"]
        loads = ["--max-concurrency", "1,3", "--slo", "ttft:5000,tpot:5000"]
        assert serve.main(["--base-url", ours.url + "/v1", *sizes, *loads, *files]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["model"] == "echo:1"
    assert [run["max_concurrency"] for run in result["runs"]] == [1, 3]
    assert all(run["num_served"] == 6 and run["goodput"]["share"] == 1 for run in result["runs"])
    assert (tmp_path / "plot.png").stat().st_size > 5000
    table = capsys.readouterr().out
    assert "1 clients" in table and "3 clients" in table and "TTFT" in table
