"""Servers for tests: `minivllm serve` in a process of its own, over the echo model, so that every token can be checked."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from tokenizers import processors

from minivllm.serving.echo_model import expected_token_ids, make_tokenizer

START_SECONDS = 60
ECHO = make_tokenizer()
BOS = ECHO.bos_token_id


class Server:
    """A running `minivllm serve`. `url`; `log` is what it has said on stderr."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "minivllm", "serve", *arguments, "--port", "0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})})
        self.log = ""
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()
        deadline = time.monotonic() + START_SECONDS
        while (found := re.search(r" at (http://\S+) ", self.log)) is None:
            if lines.get(timeout=deadline - time.monotonic()) is None:
                raise RuntimeError(f"The server ended with {self.process.wait()}:\n{self.log}")
        self.url = found[1]
        self.core_pid = psutil.Process(self.process.pid).children()[0].pid

    def _read(self, lines: queue.Queue[str | None]) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line
            lines.put(line)
        lines.put(None)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.get(path, **options)

    def stats(self) -> dict[str, Any]:
        return self.get("/stats").json()

    def wait_until_idle(self, seconds: float = 10) -> dict[str, Any]:
        """No request is open and every block is free."""
        eventually(lambda: not self.stats()["requests"], seconds)
        stats = self.stats()
        assert metric(self, "vllm:kv_cache_usage_perc") == 0
        return stats

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)

    def close(self) -> None:
        """Whatever the test left, nothing stays behind."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        eventually(lambda: not is_alive(self.core_pid), 10)  # it ends with its stdin


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@contextlib.contextmanager
def serving(*arguments: str, **options: Any) -> Iterator[Server]:
    server = Server(*arguments, **options)
    try:
        yield server
    finally:
        server.close()


def eventually(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def metric(server: Server, name: str) -> float:
    """The sum of a metric over its labels."""
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(re.escape(name) + r"[{ ]", line))


def expected_text(prompt: str, max_tokens: int) -> str:
    return ECHO.decode(expected_token_ids(ECHO.encode(prompt), max_tokens))


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON of a streamed answer's events, up to [DONE]."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))


TINY_SETTINGS = {
    "load_format": "dummy", "dtype": "float32", "attention_backend": "reference", "block_size": 4,
    "num_gpu_blocks_override": 200, "max_num_seqs": 8,
}  # fmt: skip


def as_flags(settings: dict[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def write_tiny_model(folder: Path) -> Path:
    """A model for random weights (TINY_SETTINGS). Its tokens are the echo model's; its tokenizer adds BOS, as its chat template
    does."""
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": ECHO.vocab_size, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "max_position_embeddings": 256,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    backend = make_tokenizer().backend
    backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    backend.save(str(folder / "tokenizer.json"))
    named = {**ECHO.special_tokens, "chat_template": "{{ bos_token }}" + ECHO.chat_templates["default"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder
