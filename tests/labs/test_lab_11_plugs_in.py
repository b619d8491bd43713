"""What Lab 11 builds, in the engine: the detokenizer as a component, the router in an AsyncLLM, both behind HTTP; and the
server that a notebook starts, which nothing can leave behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

import minivllm.serving.async_llm
from checks.authoring.source import answer_source
from checks.exercises import find
from checks.student import server as serving
from checks.student.engine import components, save_answer
from checks.student.failure import CheckFailed
from minivllm import SamplingParams
from minivllm.components import load_file
from minivllm.serving.async_llm import AsyncLLM
from minivllm.serving.echo_model import expected_token_ids, make_tokenizer
from minivllm.text.detokenizer import IncrementalDetokenizer
from tests.labs import harness
from tests.labs.harness import gone
from tests.serving.harness import eventually, is_alive

ROOT = Path(__file__).resolve().parents[2]
ECHO = make_tokenizer()


@pytest.fixture
def solved(student: Path) -> Path:
    """The my_engine/ of a student who wrote what Lab 11's solution says."""
    harness.solved("11.1", "11.2", "11.3")
    return student / "my_engine"


def test_the_detokenizer_is_a_component_and_gives_whole_characters(solved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = components()["detokenizer"]
    assert ".my_engine." in part.__module__
    gone(monkeypatch, IncrementalDetokenizer, "push")
    output = part(ECHO, prompt_token_ids=[1])
    assert [output.push(token_id) for token_id in ECHO.encode("a🦙é")] == ["a", "", "", "", "🦙", "", "é"]
    assert output.finish() == ""


@pytest.mark.parametrize("how", ["make_router", "components"])
def test_the_router_serves_readers_that_are_slow_and_readers_that_leave(
    solved: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    own = {"components": solved}
    if how == "make_router":
        own = {"make_router": load_file(solved / "serving" / "async_llm.py", solved).OutputRouter}
    gone(monkeypatch, minivllm.serving.async_llm.OutputRouter, "open", "route", "leave")

    async def read(llm: AsyncLLM, prompt: list[int], pause: float, count: int) -> list[int]:
        tokens: list[int] = []
        async with llm.stream({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=40)) as stream:
            async for output in stream:
                tokens += output.outputs[0].token_ids
                if len(tokens) >= count:
                    break
                await asyncio.sleep(pause)
        return tokens

    async def test() -> None:
        async with AsyncLLM("echo:2", block_size=4, max_model_len=128, **own) as llm:
            prompts = [[10 + i] * (3 + i) for i in range(6)]
            pauses, counts = [0.0, 0.05, 0.0, 0.01, 0.2, 0.0], [40, 40, 7, 40, 40, 1]
            found = await asyncio.gather(*map(read, [llm] * 6, prompts, pauses, counts))
            for tokens, prompt, count in zip(found, prompts, counts, strict=True):
                assert tokens == expected_token_ids(prompt, 40, 128)[: len(tokens)]
                assert len(tokens) == 40 if count == 40 else len(tokens) >= count
            while (await llm.snapshot())["requests"]:
                await asyncio.sleep(0.01)
            assert llm.num_open_requests == 0

    asyncio.run(asyncio.wait_for(test(), 60))


def test_my_engine_answers_over_http_and_the_server_stops(solved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = serving.serve("echo:2", "--block-size", "4", "--max-model-len", "256")
    try:
        assert "--components my_engine" in capsys.readouterr().out
        front_end = server.process.pid
        (core,) = psutil.Process(front_end).children()
        answer = server.post("/v1/completions", prompt="llama", max_tokens=9, temperature=0)
        assert answer["choices"][0]["text"] == ECHO.decode(expected_token_ids(ECHO.encode("llama"), 9, 256))
        assert server.stats()["requests"] == []
        again = serving.serve("echo:2")  # the cell runs twice: the first is gone
        assert not is_alive(front_end)
        eventually(lambda: not is_alive(core.pid))
        again.stop()
        again.stop()
        assert again.process.poll() is not None and serving._running == []
    finally:
        serving.stop_servers()


def test_a_server_that_cannot_start_says_why(student: Path) -> None:
    with pytest.raises(CheckFailed, match=r"(?s)did not start:.*max_model_len"):
        serving.serve("echo", "--max-model-len", "1000000")
    assert serving._running == []


def test_a_missing_package_is_named_with_its_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(CheckFailed, match=r"needs fastapi\..*pip install -e '\.\[serve\]'"):
        serving.need_serving()


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_a_kernel_that_is_killed_leaves_no_server_behind(student: Path) -> None:
    code = "from checks import serve; s = serve('echo:2'); print(s.process.pid, s.url, flush=True); input()"
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert parent.stdout is not None
        lines = [parent.stdout.readline() for _ in range(3)]
        pid, url = lines[-1].split()
        front_end = psutil.Process(int(pid))
        processes = [process.pid for process in (front_end, *front_end.children())]
        assert len(processes) == 2
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        eventually(lambda: not any(map(is_alive, processes)))
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(f"{url}/health", timeout=2)
    finally:
        parent.kill()
        parent.wait()


def test_an_exercises_cell_may_await(kernel: Any) -> None:
    """As in a notebook: the kernel runs it, and so does the check, in its own process."""
    answer = "def double(x):\n    return 2 * x\n"
    shown = kernel.run(f"from checks import check\nimport asyncio\n\n{answer}\n\nawait asyncio.sleep(0)\n\ncheck('0.0')")
    assert "Exercise 0.0 passed" in shown[0]


def test_an_answer_that_awaits_at_its_top_level_stays_out_of_my_engine(student: Path) -> None:
    source = answer_source(find("11.2")) + "\nimport asyncio\n\nmark = await asyncio.sleep(0, 1)\n"
    with pytest.raises(ValueError, match="awaits outside of a function"):
        save_answer(find("11.2"), source)
