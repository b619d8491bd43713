"""The parent's side: run a cell on some cases in a child, within limits, and say how it went.

    outcome = run_in_child(Request(source=..., ...), Limits())

Where there is fork, children come from a fork server that this process owns (one a kernel, so two notebooks never meet);
elsewhere (Windows) each child is a new Python, which costs about two seconds. The kernel itself is never at risk: whatever the
child does, it is the child that is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from checks.sandbox.plain import read_frame, write_frame

ROOT = Path(__file__).resolve().parents[2]
HAS_FORK = hasattr(os, "fork") and hasattr(socket, "send_fds") and sys.platform != "win32"
_SIGXCPU, _SIGKILL = 24, 9  # how the CPU limit set from inside ends a child, and how a system out of memory does
PRELOAD = ["numpy", "checks.sandbox.child", "checks.exercises"]  # with torch: what every child needs
START_SECONDS = 120.0  # importing torch from a cold disk


@dataclass(frozen=True)
class Limits:
    """What one check may use. `cpu_seconds` is the limit that counts (a busy machine is not the student's fault);
    `wall_seconds` ends what sleeps. Output beyond `kept_output` characters is cut, beyond `output_bytes` the child is ended."""

    cpu_seconds: float = 10.0
    wall_seconds: float = 30.0
    memory_bytes: int = 1 << 30
    kept_output: int = 2000
    output_bytes: int = 4 << 20


@dataclass(frozen=True)
class Request:
    """What the child is told. `functions` are signatures, `runner` is a module whose RUN[exercise] is the check's `run`."""

    source: str
    filename: str
    functions: tuple[str, ...]
    runner: str
    exercise: str
    cases: list[Any]


@dataclass
class Outcome:
    """What came back. `messages` are the child's, in order; `ended` says how the child ended: "done", "time", "memory",
    "output" or "exit" (on its own, before it was done), with `status` its exit code or minus the signal."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    ended: str = "done"
    status: int = 0
    output: str = ""


class Unavailable(RuntimeError):
    """No child could be started at all."""


@dataclass
class _Job:
    send: BinaryIO
    receive: BinaryIO
    output: BinaryIO

    def kill(self) -> None:
        raise NotImplementedError

    def wait(self, seconds: float) -> int | None:
        """The exit status (minus the signal, if one ended it), or None if it still runs after so many seconds."""
        raise NotImplementedError


def run_in_child(request: Request, limits: Limits, *, fork: bool = HAS_FORK) -> Outcome:
    """Run the request in a new child and collect what it says until it is done, or a limit is reached. One at a time. If this
    is interrupted (KeyboardInterrupt), the child dies and the next call starts afresh."""
    with _one_at_a_time:
        try:
            return _watch(_server().start() if fork else _Spawned(), request, limits)
        except BaseException:
            close_server()
            raise


def _watch(job: _Job, request: Request, limits: Limits) -> Outcome:
    outcome = Outcome(ended="interrupted")
    messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
    capture = _Capture(job.output, limits)
    reader = threading.Thread(target=_read_messages, args=(job.receive, messages), daemon=True)
    limits_told = {"cpu_seconds": limits.cpu_seconds, "memory_bytes": limits.memory_bytes}
    status = None
    try:
        with contextlib.suppress(OSError):  # it died already: its exit status says how
            write_frame(job.send, {**vars(request), **limits_told})
        reader.start()
        capture.start()
        outcome.ended = _collect(outcome, messages, capture, limits)
        if outcome.ended == "exit":  # how it ended by itself is worth knowing; a kill would overwrite it
            status = job.wait(2.0)
    finally:
        if status is None:
            job.kill()
    if status is None:
        outcome.status = job.wait(30.0) or 0
    else:
        outcome.status = status
        outcome.ended = {-_SIGXCPU: "time", -_SIGKILL: "memory"}.get(status, "exit")
    reader.join(5)
    capture.join(5)
    for stream in (job.send, job.receive, job.output):
        stream.close()
    outcome.output = capture.text()
    return outcome


def _collect(outcome: Outcome, messages: queue.Queue[dict[str, Any] | None], capture: _Capture, limits: Limits) -> str:
    deadline = time.monotonic() + START_SECONDS
    while True:
        if capture.overflowed:
            return "output"
        if time.monotonic() > deadline:
            return "time"
        try:
            message = messages.get(timeout=0.05)
        except queue.Empty:
            continue
        if message is None:
            return "output" if capture.overflowed else "exit"
        if message["kind"] == "started":  # only now does the student's time run
            deadline = time.monotonic() + limits.wall_seconds
            continue
        if message["kind"] == "memory":
            return "memory"
        if message["kind"] == "done":
            return "done"
        outcome.messages.append(message)
        if message["kind"] == "problem" and message["case"] is None:
            return "done"


def _read_messages(stream: BinaryIO, messages: queue.Queue[dict[str, Any] | None]) -> None:
    """Until the stream ends, or says something that is not a message (the student's code wrote into it)."""
    try:
        while isinstance(message := read_frame(stream), dict) and "kind" in message:
            messages.put({"case": None, **message})
    except Exception:  # an end in the middle, forged bytes: both are an end
        pass
    messages.put(None)


class _Capture(threading.Thread):
    """Reads what the student's code prints: keeps the beginning, counts the rest."""

    def __init__(self, stream: BinaryIO, limits: Limits) -> None:
        super().__init__(daemon=True)
        self._stream, self._limits = stream, limits
        self._kept, self._total = b"", 0
        self.overflowed = False

    def run(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := self._stream.read(65536):
                self._total += len(data)
                if len(self._kept) < 4 * self._limits.kept_output:
                    self._kept += data
                self.overflowed = self._total > self._limits.output_bytes

    def text(self) -> str:
        text = self._kept.decode("utf-8", errors="replace")
        limit = self._limits.kept_output
        if len(text) > limit or self._total > len(self._kept):
            return text[:limit] + f"\n... (output cut here, after {min(limit, len(text)):,} characters)\n"
        return text


class _Spawned(_Job):
    """A child that is a new Python process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            _python("from checks.sandbox.child import main_spawned; main_spawned()"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            start_new_session=HAS_FORK, env=_environment(),
        )  # fmt: skip
        assert self._process.stdin and self._process.stdout and self._process.stderr
        super().__init__(self._process.stdin, self._process.stdout, self._process.stderr)  # type: ignore[arg-type]

    def kill(self) -> None:
        if HAS_FORK:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def wait(self, seconds: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None


class _ForkServer:
    """The kernel's own fork server. Its life hangs on the control socket."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._control, theirs = socket.socketpair()
        self._pending, self._jobs, self._ready = b"", 0, False
        code = f"from checks.sandbox.forkserver import main; main({theirs.fileno()}, {PRELOAD!r})"
        self._process = subprocess.Popen(
            _python(code), pass_fds=[theirs.fileno()], start_new_session=True, env=_environment(),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        theirs.close()

    def start(self) -> _Job:
        """Fork a child. Raises Unavailable if the server does not come up."""
        if not self._ready and self._read(START_SECONDS) is None:
            raise Unavailable(f"Python did not start within {START_SECONDS:.0f} s to run a check. Is the machine overloaded?")
        self._ready = True
        self._jobs += 1
        ours, frames = socket.socketpair()
        output_read, output_write = os.pipe()
        socket.send_fds(self._control, [json.dumps({"job": self._jobs}).encode() + b"\n"], [frames.fileno(), output_write])
        frames.close()
        os.close(output_write)
        stream = ours.makefile("rwb", buffering=0)
        ours.close()  # the stream keeps the socket
        return _Forked(stream, stream, os.fdopen(output_read, "rb", buffering=0), self, self._jobs)  # type: ignore[arg-type]

    def kill(self, job: int) -> None:
        self._control.sendall(json.dumps({"kill": job}).encode() + b"\n")

    def wait(self, job: int, seconds: float) -> int | None:
        while (message := self._read(seconds)) is not None:
            if message.get("job") == job:
                return message["status"]
        return None

    def _read(self, seconds: float) -> dict[str, int] | None:
        """The server's next message; None if none comes in time."""
        self._control.settimeout(seconds)
        while b"\n" not in self._pending:
            try:
                data = self._control.recv(4096)
            except TimeoutError:
                return None
            if not data:
                raise Unavailable(
                    "The process that runs checks has ended. Run the cell again; if it says this again, see whether"
                    f" `{sys.executable} -c 'import torch'` works."
                )
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return dict(json.loads(line))

    def alive(self) -> bool:
        return self.owner == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        self._control.close()
        if self.owner == os.getpid():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(2)


@dataclass
class _Forked(_Job):
    server: _ForkServer
    number: int

    def kill(self) -> None:
        self.server.kill(self.number)

    def wait(self, seconds: float) -> int | None:
        return self.server.wait(self.number, seconds)


_one_at_a_time = threading.Lock()
_the_server: _ForkServer | None = None


def _server() -> _ForkServer:
    global _the_server
    if _the_server is None or not _the_server.alive():
        _the_server = _ForkServer()
    return _the_server


def warm_up() -> None:
    """Start the fork server without waiting for it, so that the first check finds it ready."""
    if HAS_FORK:
        _server()


def close_server() -> None:
    """End the fork server, and with it every child. The next check starts another."""
    global _the_server
    server, _the_server = _the_server, None
    if server is not None:
        server.close()


atexit.register(close_server)


def _python(code: str) -> list[str]:
    """This Python, finding modules where this process finds them, running `code`."""
    path = [str(ROOT), *(p for p in sys.path if p)]
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {code}"]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"} | (
        # macOS stops a forked process that uses Apple's frameworks unless it is told that this is meant.
        {"OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"} if sys.platform == "darwin" else {}
    )
