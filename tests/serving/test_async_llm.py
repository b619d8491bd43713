"""AsyncLLM in a program's own event loop, and the routing of outputs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from minivllm import SamplingParams
from minivllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from minivllm.serving.async_llm import AsyncLLM, EngineDeadError, OutputRouter, RequestAbortedError
from minivllm.serving.echo_model import expected_token_ids
from tests.serving.harness import ECHO, is_alive

GREEDY = SamplingParams(temperature=0, max_tokens=30)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


@asynccontextmanager
async def started(model: str = "echo", **settings: Any) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(model, block_size=4, max_model_len=256, **settings) as llm:
        yield llm


async def idle(llm: AsyncLLM) -> None:
    """Nothing is open, here or in the core."""
    deadline = time.monotonic() + 10
    while (await llm.snapshot())["requests"]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert llm.num_open_requests == 0
    assert not llm._user_ids and not llm._output_processor._open and not llm._output_processor._requests


# ---------------------------------------------------------------- routing


def delta(request_id: str, token_id: int, finished: bool = False, index: int = 0) -> RequestOutput:
    completion = CompletionOutput(index, f"<{token_id}>", [token_id], finish_reason="length" if finished else None)
    return RequestOutput(request_id, None, [1], [completion], finished, metrics=RequestMetrics())


def test_outputs_go_to_their_own_stream_in_order() -> None:
    async def test() -> None:
        router = OutputRouter(abort=lambda request_id: None)
        streams = {name: router.open(name) for name in "ab"}

        async def read(name: str) -> list[int]:
            return [token for output in [output async for output in streams[name]] for token in output.outputs[0].token_ids]

        readers = {name: asyncio.create_task(read(name)) for name in "ab"}
        for i in range(50):
            for name, offset in (("a", 0), ("b", 100)):
                router.route(name, delta(name, offset + i, finished=i == 49))
            if i % 7 == 0:
                await asyncio.sleep(0)
        assert await readers["a"] == list(range(50))
        assert await readers["b"] == list(range(100, 150))
        assert len(router) == 0

    run(test())


def test_what_a_slow_reader_has_not_read_is_one_output() -> None:
    async def test() -> None:
        router = OutputRouter(abort=lambda request_id: None)
        stream = router.open("a")
        for i in range(1000):
            router.route("a", delta("a", i))
        output = await anext(stream)
        assert output.outputs[0].token_ids == list(range(1000))
        assert output.outputs[0].text == "".join(f"<{i}>" for i in range(1000))
        router.route("a", delta("a", 7, index=1))
        router.route("a", delta("a", 8, finished=True))
        last = await anext(stream)
        assert [(one.index, one.token_ids) for one in last.outputs] == [(1, [7]), (0, [8])] and last.finished
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(test())


def test_a_reader_that_leaves_aborts_once_and_what_comes_late_is_dropped() -> None:
    async def test() -> None:
        aborted: list[str] = []
        router = OutputRouter(aborted.append)
        stream, other = router.open("a"), router.open("b")
        stream.close()
        stream.close()
        router.route("a", delta("a", 1))
        router.route("b", delta("b", 2, finished=True))
        assert (await anext(other)).finished
        other.close()  # it has ended by itself
        assert aborted == ["a"]

    run(test())


def test_a_stream_that_is_dropped_aborts() -> None:
    async def test() -> None:
        aborted: list[str] = []
        router = OutputRouter(aborted.append)
        stream = router.open("a")
        router.route("a", delta("a", 1))
        del stream
        assert aborted == ["a"] and len(router) == 0

    run(test())


def test_an_error_comes_after_what_there_was_to_read() -> None:
    async def test() -> None:
        router = OutputRouter(abort=lambda request_id: None)
        stream = router.open("a")
        router.route("a", delta("a", 1))
        router.fail(RuntimeError("broken"))
        assert (await anext(stream)).outputs[0].token_ids == [1]
        for _ in range(2):
            with pytest.raises(RuntimeError, match="broken"):
                await anext(stream)

    run(test())


# ---------------------------------------------------------------- the engine


def test_generate_and_stream_give_the_same() -> None:
    async def test() -> None:
        async with started() as llm:
            whole = await llm.generate("The capital", GREEDY)
            deltas = [output async for output in llm.stream("The capital", GREEDY)]
            expected = expected_token_ids(ECHO.encode("The capital"), 30)
            assert whole.outputs[0].token_ids == expected
            assert [t for output in deltas for t in output.outputs[0].token_ids] == expected
            assert "".join(output.outputs[0].text for output in deltas) == whole.outputs[0].text
            chat = await llm.generate([{"role": "user", "content": "Hi"}], GREEDY)
            assert chat.prompt == "user: Hi\nassistant: "
            await idle(llm)

    run(test())


def test_many_at_once_each_get_their_own() -> None:
    async def test() -> None:
        async with started(num_gpu_blocks_override=150) as llm:  # too few for all: some are preempted
            prompts = [[i, 3, 5, *range(i)] for i in range(40)]
            outputs = await asyncio.gather(*(llm.generate(prompt, GREEDY) for prompt in prompts))
            assert [o.outputs[0].token_ids for o in outputs] == [expected_token_ids(prompt, 30) for prompt in prompts]
            await idle(llm)

    run(test())


def test_cancelling_a_task_and_leaving_or_dropping_a_stream_abort_their_requests() -> None:
    async def test() -> None:
        async with started("echo:20") as llm:
            task = asyncio.create_task(llm.generate("x" * 50, SamplingParams(max_tokens=200)))
            async with llm.stream("y" * 50, SamplingParams(max_tokens=200, n=3)) as stream:
                await anext(stream)
                dropped = llm.stream("z" * 50, SamplingParams(max_tokens=200))
                await anext(dropped)
                assert len((await llm.snapshot())["requests"]) == 5
                del dropped
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await idle(llm)

    run(test())


def test_abort_by_id_tells_the_reader() -> None:
    async def test() -> None:
        async with started("echo:20") as llm:
            stream = llm.stream("x", SamplingParams(max_tokens=200), request_id="mine")
            await anext(stream)
            with pytest.raises(ValueError, match="request_id 'mine' is in use"):
                llm.stream("y", GREEDY, request_id="mine")
            await llm.abort("mine")
            await llm.abort("unknown")
            with pytest.raises(RequestAbortedError, match="'mine' was aborted"):
                while True:
                    await anext(stream)
            assert (await llm.generate("y", GREEDY, request_id="mine")).finished
            await idle(llm)

    run(test())


def test_a_bad_request_is_refused_here_and_touches_nothing() -> None:
    async def test() -> None:
        async with started() as llm:
            for prompt in ("", [], [10**6], "x" * 300):
                with pytest.raises(ValueError):
                    llm.stream(prompt, GREEDY)
            await idle(llm)
            assert (await llm.generate("x", GREEDY)).finished

    run(test())


def test_reset_prefix_cache_over_the_wire() -> None:
    async def test() -> None:
        async with started() as llm:
            prompt = "a prompt of several blocks"
            cached = [(await llm.generate(prompt, GREEDY)).num_cached_tokens for _ in range(2)]
            assert await llm.reset_prefix_cache()
            cached.append((await llm.generate(prompt, GREEDY)).num_cached_tokens)
            assert cached == [0, 24, 0]

    run(test())


def test_a_dead_core_fails_what_is_open_and_what_comes() -> None:
    async def test() -> None:
        async with started("echo:20") as llm:
            told: list[EngineDeadError] = []
            llm.on_death = told.append
            stream = llm.stream("x", SamplingParams(max_tokens=200))
            await anext(stream)
            question = asyncio.create_task(llm.snapshot())
            os.kill(llm._client.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="killed by signal 9"):
                while True:
                    await anext(stream)
            with pytest.raises(EngineDeadError):
                llm.stream("y", GREEDY)
            with pytest.raises(EngineDeadError):
                await llm.snapshot()
            await asyncio.gather(question, return_exceptions=True)
            assert "killed by signal 9" in (llm.what_is_wrong() or "")
            assert len(told) == 1

    run(test())


def test_a_silent_core_is_unwell_and_well_again_when_it_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with started() as llm:
            await llm.generate("x", GREEDY)
            assert llm.what_is_wrong() is None
            monkeypatch.setattr("minivllm.serving.core_client.SILENCE_SECONDS", 1.5)
            os.kill(llm._client.pid, signal.SIGSTOP)
            try:
                while llm.what_is_wrong() is None:
                    await asyncio.sleep(0.05)
                assert "no sign of life" in (llm.what_is_wrong() or "")
            finally:
                os.kill(llm._client.pid, signal.SIGCONT)
            while llm.what_is_wrong() is not None:
                await asyncio.sleep(0.05)

    run(test())


def test_a_core_stuck_in_a_step_is_unwell(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with started("echo:2500") as llm:
            monkeypatch.setattr("minivllm.serving.core_client.STUCK_SECONDS", 0.5)
            async with llm.stream("x", GREEDY):
                while llm.what_is_wrong() is None:
                    await asyncio.sleep(0.05)
                assert "in one step for" in (llm.what_is_wrong() or "")

    run(test())


def test_after_shutdown_nothing_is_left_and_nothing_is_taken() -> None:
    async def test() -> None:
        llm = await AsyncLLM("echo:20").start()
        pid = llm._client.pid
        stream = llm.stream("x", GREEDY)
        await llm.shutdown()
        await llm.shutdown()
        assert not is_alive(pid)
        with pytest.raises(EngineDeadError, match="shut down"):
            await anext(stream)
        with pytest.raises(EngineDeadError, match="shut down"):
            llm.stream("x", GREEDY)

    run(test())


def test_what_cannot_be_served_is_refused_before_a_process_is_started() -> None:
    with pytest.raises(ValueError, match="trace=True is LLM's"):
        AsyncLLM("echo", trace=True)
    with pytest.raises(ValueError, match="Did you mean 'max_model_len'"):
        AsyncLLM("echo", max_model_length=5)
