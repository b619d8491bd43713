"""serve(...): the student's engine behind HTTP, as a child of the notebook's kernel.

    server = serve(lab.model)          minivllm serve MODEL --components my_engine --port 0
    server.url, server.stats(), server.stop()

It cannot be left behind. It ends with `stop`, at the kernel's exit, and when the kernel is killed: then its stdin is closed,
for which a thread beside the server waits (`python -m checks.student.server`). It listens on 127.0.0.1, on a free port. There
is one at a time, so a cell that runs twice does not load the model twice.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from typing import Any

from checks.student.engine import components
from checks.student.failure import CheckFailed
from checks.student.home import ROOT, engine_dir, read_progress

START_SECONDS = 300.0  # a large model, from a cold disk
GRACE_SECONDS = 10.0  # from being asked to end to being killed
_running: list[Server] = []


class Server:
    """A server that is ready. `url` and `process`; `log`, what it has said so far."""

    def __init__(self, flags: list[str]) -> None:
        self.log: list[str] = []
        self.flags = flags
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        }
        # A session of its own: "interrupt the kernel" sends its signal to everybody in the kernel's.
        new_session: dict[str, Any] = {"start_new_session": True}
        if os.name == "nt":
            new_session = {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "checks.student.server", *flags, "--host", "127.0.0.1", "--port", "0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            **new_session,
        )
        try:
            self.url = self._wait_for_url()
        except BaseException:
            self.stop()
            raise

    def _wait_for_url(self) -> str:
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                line = lines.get(timeout=1.0)
            except queue.Empty:
                continue
            if line is None:
                raise CheckFailed("The server did not start:\n" + "\n".join(self.log[-8:]))
            if found := re.search(r"^Serving .* at (http://\S+) ", line):
                return found[1]
        raise CheckFailed(f"The server was not ready after {START_SECONDS:.0f} s:\n" + "\n".join(self.log[-8:]))

    def _read(self, lines: queue.Queue[str | None]) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            lines.put(line)
        lines.put(None)

    def get(self, path: str) -> Any:
        """The JSON that a GET answers, such as get("/stats")."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
            return json.load(answer)

    def post(self, path: str, **body: Any) -> Any:
        """The JSON that a POST answers."""
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}{path}", data, kind), timeout=300) as answer:
            return json.load(answer)

    def stats(self) -> dict[str, Any]:
        """Now: `num_blocks`, and for each open request its `request_id`, `block_ids`, `num_output_tokens` and more."""
        found: dict[str, Any] = self.get("/stats")
        return found

    def stop(self) -> None:
        """End it: open answers are cut off. Safe to call twice."""
        if self in _running:
            _running.remove(self)
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_SECONDS)
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def need_serving() -> None:
    """Raises CheckFailed naming the pip command, if a package that a server needs is missing."""
    missing = []
    for name in ("fastapi", "uvicorn", "zmq", "msgspec", "prometheus_client"):
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise CheckFailed(
            f"This lab runs a server, which needs {' and '.join(missing)}. In the clone's folder:"
            " pip install -e '.[serve]', then restart the kernel."
        )


def serve(model: str, *flags: str) -> Server:
    """Start a server with the student's components, and wait until it is ready. One that runs already is stopped first. flags:
    of `minivllm serve`. Raises CheckFailed with what the server said, if it does not start."""
    need_serving()
    stop_servers()
    _go_round_proxies()
    mine = components()
    command = [model, *(["--components", str(engine_dir())] if mine else []), *flags]
    shown = " ".join("my_engine" if word == str(engine_dir()) else word for word in command)
    print(f"minivllm serve {shown}", flush=True)
    if asked := [seam for seam, whose in read_progress()["use"].items() if whose == "reference" and mine]:
        print(f"(A server takes all of my_engine/: use(..., 'reference') for {', '.join(asked)} does not count here.)")
    begin = time.monotonic()
    server = Server([*command, "--shutdown-timeout", "1"])
    _running.append(server)
    print(f"ready after {time.monotonic() - begin:.1f} s at {server.url}")
    return server


def _go_round_proxies() -> None:
    """What this notebook asks of 127.0.0.1 is no proxy's business."""
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in os.environ.get(name, "").split(",") if host]
        if "127.0.0.1" not in hosts and "*" not in hosts:
            os.environ[name] = ",".join([*hosts, "127.0.0.1"])


@atexit.register
def stop_servers() -> None:
    for server in list(_running):
        server.stop()


# ---------------------------------------------------------------------------------------------------- in the child's process


def _end_with_stdin() -> None:
    """The kernel holds the other end of stdin; however it dies, the system closes it."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def main(arguments: list[str]) -> int:
    from minivllm.cli import main as minivllm

    threading.Thread(target=_end_with_stdin, daemon=True).start()
    return minivllm(["serve", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
