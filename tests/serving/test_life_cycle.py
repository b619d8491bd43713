"""How a server starts, how it ends, and what its clients see when they, or parts of it, go away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.harness import Server, events, eventually, expected_text, is_alive, serving


class Reader(threading.Thread):
    """A client with one stream, read to its end in a thread."""

    def __init__(self, server: Server, prompt: str, max_tokens: int, stream: bool = True) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
        self.text = ""
        self.error: dict[str, Any] | None = None
        self.status = 0
        self.begun = threading.Event()
        self.start()

    def run(self) -> None:
        with self.server.client() as client, client.stream("POST", "/v1/completions", json=self.body) as response:
            self.status = response.status_code
            if not self.body["stream"] or self.status != 200:
                response.read()
                self.error = response.json().get("error")
                return
            try:
                for chunk in events(response):
                    self.begun.set()
                    self.error = chunk.get("error")
                    self.text += "" if self.error else chunk["choices"][0]["text"]
            except httpx.RemoteProtocolError:
                self.error = {"message": "cut off"}


def run_serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "minivllm", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks_within_a_step(slow_echo: Server, stream: bool) -> None:
    body = {"prompt": "x" * 100, "max_tokens": 300, "stream": stream, "n": 2}
    client = slow_echo.client(headers={})
    request = client.build_request("POST", "/v1/completions", json=body)
    if stream:
        response = client.send(request, stream=True)
        seen = events(response)
        next(seen)
    else:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=body, timeout=0.3)
    if stream:
        assert len(slow_echo.stats()["requests"]) == 2
        response.close()
    client.close()
    time.sleep(0.15)  # it leaves in the middle of a step of 50 ms; the abort is obeyed before the next
    assert slow_echo.stats()["requests"] == []
    slow_echo.wait_until_idle()


def test_a_client_that_leaves_while_its_request_waits_is_taken_from_the_queue() -> None:
    with serving("echo:50", "--max-num-seqs", "1") as server:
        running = Reader(server, "running", 30)
        running.begun.wait()
        with server.client() as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json={"prompt": "waiting", "max_tokens": 5}, timeout=0.3)
        eventually(lambda: len(server.stats()["requests"]) == 1)
        running.join()
        assert running.text == expected_text("running", 30)


# ---------------------------------------------------------------- ends


def test_sigterm_under_load_finishes_open_answers_takes_no_new_ones_and_exits_0(slow_echo: Server) -> None:
    readers = [Reader(slow_echo, f"reader {i}", 25) for i in range(8)]
    readers.append(Reader(slow_echo, "not streamed", 25, stream=False))
    for reader in readers[:8]:
        assert reader.begun.wait(10)
    slow_echo.process.send_signal(signal.SIGTERM)
    eventually(lambda: "Stopping" in slow_echo.log)
    with pytest.raises(httpx.ConnectError):
        eventually(lambda: slow_echo.get("/health").status_code != 200, 3)
    for i, reader in enumerate(readers[:8]):
        reader.join(20)
        assert (reader.error, reader.text) == (None, expected_text(f"reader {i}", 25))
    readers[8].join(20)
    assert (readers[8].status, readers[8].error) == (200, None)
    assert slow_echo.process.wait(timeout=20) == 0
    eventually(lambda: not is_alive(slow_echo.core_pid))


def test_a_second_signal_stops_at_once(slow_echo: Server) -> None:
    reader = Reader(slow_echo, "long", 400)
    assert reader.begun.wait(10)
    slow_echo.process.send_signal(signal.SIGINT)
    eventually(lambda: "Stopping" in slow_echo.log)
    slow_echo.process.send_signal(signal.SIGINT)
    assert slow_echo.process.wait(timeout=8) == 0  # 400 steps would take 20 s
    eventually(lambda: not is_alive(slow_echo.core_pid))


def test_the_shutdown_timeout_ends_answers_that_take_too_long() -> None:
    with serving("echo:50", "--shutdown-timeout", "1") as server:
        reader = Reader(server, "long", 400)
        assert reader.begun.wait(10)
        assert server.terminate() == 0
        reader.join(5)
        assert reader.error == {"message": "cut off"}


def test_kill_9_of_the_core_under_load_fails_open_requests_turns_health_red_and_exits_1(slow_echo: Server) -> None:
    streams = [Reader(slow_echo, f"reader {i}", 300) for i in range(4)]
    wholes = [Reader(slow_echo, f"whole {i}", 300, stream=False) for i in range(4)]
    for reader in streams:
        assert reader.begun.wait(10)
    eventually(lambda: len(slow_echo.stats()["requests"]) == 8)
    os.kill(slow_echo.core_pid, signal.SIGKILL)
    for reader in wholes:
        reader.join(10)
        assert reader.status == 503
        assert reader.error is not None and "killed by signal 9" in reader.error["message"]
    health = slow_echo.get("/health")
    assert health.status_code == 503 and "killed by signal 9" in health.json()["error"]["message"]
    assert slow_echo.post("/v1/completions", {"prompt": "late"}).status_code == 503
    for i, reader in enumerate(streams):
        reader.join(10)
        assert expected_text(f"reader {i}", 300).startswith(reader.text) and reader.text
        assert reader.error is not None and reader.error["code"] == "engine_dead"
    assert slow_echo.process.wait(timeout=20) == 1


def test_a_core_that_can_compute_nothing_any_more_ends_as_if_it_were_killed(tmp_path: Path) -> None:
    """A GPU that refuses every call; here a scheduler says so."""
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "scheduler.py").write_text(
        "from minivllm.core import scheduler, step\n\n"
        "class Scheduler(scheduler.Scheduler):\n"
        "    def schedule(self):\n"
        "        if any(len(r.output_token_ids) > 5 for r in self.running):\n"
        "            raise step.ExecutorDeadError('an illegal memory access')\n"
        "        return super().schedule()\n"
    )
    with serving("echo:20", "--components", str(tmp_path)) as server:
        reader = Reader(server, "reader", 30)
        reader.join(10)
        assert reader.text and reader.error is not None and reader.error["code"] == "engine_dead"
        assert server.get("/health").status_code == 503
        assert server.process.wait(timeout=20) == 1


def test_kill_9_of_the_front_end_leaves_no_core_behind(slow_echo: Server) -> None:
    slow_echo.process.kill()
    eventually(lambda: not is_alive(slow_echo.core_pid))


# ---------------------------------------------------------------- starts


def test_a_port_in_use_is_told_at_once_and_two_servers_run_beside_each_other(echo: Server, slow_echo: Server) -> None:
    port = echo.url.rpartition(":")[2]
    refused = run_serve("echo", "--port", port)
    assert refused.returncode == 1
    assert f"Port {port} of 127.0.0.1 is in use" in refused.stderr and "Traceback" not in refused.stderr
    body = {"prompt": "both", "max_tokens": 5, "temperature": 0}
    texts = [server.post("/v1/completions", body).json()["choices"][0]["text"] for server in (echo, slow_echo)]
    assert texts == [expected_text("both", 5)] * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/no/such/folder"], "/no/such/folder"),
        (["echo:soon"], "milliseconds of a step"),
        (["echo", "--max-model-len", "5000"], "max_model_len=5000 is more than the model's"),  # found by the core
        (["echo", "--dtype", "float32"], "no weights"),
        (["echo", "--components", "/no/such/parts"], "No components folder"),
        (["echo", "--max-open-requests", "0"], "--max-open-requests must be at least 1"),
        (["echo", "--port", "70000"], "--port must be from 0 to 65535"),
    ],
    ids=str,
)
def test_a_server_that_cannot_start_says_why_and_exits_1(arguments: list[str], words: str) -> None:
    refused = run_serve("--port", "0", *arguments) if "--port" not in arguments else run_serve(*arguments)
    assert refused.returncode == 1
    assert words in refused.stderr and "Traceback" not in refused.stderr


def test_a_model_of_the_hub_that_is_out_of_reach_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused = run_serve("--port", "0", "no-such-owner/no-such-model")
    assert refused.returncode == 1
    assert "no-such-owner/no-such-model" in refused.stderr and "Traceback" not in refused.stderr


def test_a_signal_before_the_server_is_ready_ends_it_with_0(tiny_folder: Path) -> None:
    command = [sys.executable, "-m", "minivllm", "serve", str(tiny_folder), "--load-format", "dummy", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "Loading" in process.stderr.readline()  # from now on there is a core, importing torch
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 0
    process.stderr.close()


def test_components_of_a_folder_are_served_and_what_they_lack_is_refused(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "block_hash.py").write_text(
        "def hash_block(parent, tokens, extra=()):\n    return (parent, tuple(tokens), extra)\n\n"
        "hash_block.capabilities = frozenset()\n"
    )
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "detokenizer.py").write_text(
        "from minivllm.text import detokenizer\n\n"
        "class IncrementalDetokenizer(detokenizer.IncrementalDetokenizer):\n"
        "    def push(self, token_id):\n        return super().push(token_id).upper()\n"
    )
    with serving("echo", "--components", str(tmp_path), "--block-size", "4") as server:
        body = {"prompt": "hello hello", "max_tokens": 20, "temperature": 0}
        assert server.post("/v1/completions", body).json()["choices"][0]["text"] == expected_text("hello hello", 20).upper()
        refused = server.post("/v1/completions", {**body, "cache_salt": "x"})
        assert refused.status_code == 400 and "block_hash component" in refused.json()["error"]["message"]
        server.wait_until_idle()
