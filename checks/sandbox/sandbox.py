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

from checks.sandbox.folders import hold
from checks.sandbox.jail import Jail
from checks.sandbox.plain import MAX_FRAME_BYTES, read_frame, write_frame

ROOT = Path(__file__).resolve().parents[2]
HAS_FORK = hasattr(os, "fork") and hasattr(socket, "send_fds") and sys.platform != "win32"
_SIGXCPU, _SIGKILL = 24, 9  # how the CPU limit set from inside ends a child, and how a system out of memory does
PRELOAD = ["numpy", "checks.sandbox.child", "checks.exercises"]  # with torch: what every child needs
WALLS = str(ROOT / "checks" / "sandbox" / "jail.py")
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
    tree: str = ""  # a folder whose packages come before all others: minivllm without an answer
    strict: bool = False  # under jail.py's system call filter, and with limits on files and threads too
    forbidden: tuple[str, ...] = ()  # folders of which nothing may be read


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
    cpu_seconds: float = field(default=0.0, init=False)  # known after wait(), where children are forked

    def kill(self) -> None:
        raise NotImplementedError

    def wait(self, seconds: float) -> int | None:
        """The exit status (minus the signal, if one ended it), or None if it still runs after so many seconds."""
        raise NotImplementedError


def run_in_child(request: Request, limits: Limits, *, fork: bool = HAS_FORK, jail: Jail | None = None) -> Outcome:
    """Run the request in a new child and collect what it says until it is done, or a limit is reached. One at a time. If this
    is interrupted (KeyboardInterrupt), the child dies and the next call starts afresh. With a `jail` the child runs in it."""
    with _one_at_a_time:
        try:
            return _watch(_server(jail).start() if fork else _Spawned(jail), request, limits)
        except BaseException:
            close_server()
            raise


def _watch(job: _Job, request: Request, limits: Limits) -> Outcome:
    outcome = Outcome(ended="interrupted")
    messages: queue.Queue[dict[str, Any] | None] = queue.Queue(maxsize=8)  # a child that never stops talking has to wait
    capture = _Capture(job.output, limits)
    reader = threading.Thread(target=_read_messages, args=(job.receive, messages), daemon=True)
    limits_told = {"cpu_seconds": limits.cpu_seconds, "memory_bytes": limits.memory_bytes}
    status = None
    try:
        with contextlib.suppress(OSError):  # it died already: its exit status says how
            write_frame(job.send, {**vars(request), **limits_told})
        reader.start()
        capture.start()
        outcome.ended = _collect(outcome, messages, capture, limits, len(request.cases))
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
        if outcome.ended == "memory" and job.cpu_seconds >= limits.cpu_seconds:  # it did not heed the first signal
            outcome.ended = "time"
    _drain(messages, reader)
    capture.join(5)
    for stream in (job.send, job.receive, job.output):
        stream.close()
    outcome.output = capture.text()
    return outcome


def _drain(messages: queue.Queue[dict[str, Any] | None], reader: threading.Thread) -> None:
    """Let the reader get rid of what nobody wants any more, until the stream ends with the child."""
    deadline = time.monotonic() + 5
    while reader.is_alive() and time.monotonic() < deadline:
        with contextlib.suppress(queue.Empty):
            messages.get(timeout=0.05)


def _collect(
    outcome: Outcome, messages: queue.Queue[dict[str, Any] | None], capture: _Capture, limits: Limits, cases: int
) -> str:
    """Messages may be forged: they never make the time longer, nor more of themselves than there are cases."""
    deadline = time.monotonic() + START_SECONDS
    started = False
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
            deadline = deadline if started else time.monotonic() + limits.wall_seconds
            started = True
            continue
        if message["kind"] == "memory":
            return "memory"
        if message["kind"] == "done":
            return "done"
        if len(outcome.messages) > cases:  # "ready", and one a case, is all a child has to say
            return "exit"
        outcome.messages.append(message)
        if message["kind"] == "problem" and message["case"] is None:
            return "done"


def _read_messages(stream: BinaryIO, messages: queue.Queue[dict[str, Any] | None]) -> None:
    """Until the stream ends, or says something that is not a message (the student's code wrote into it)."""
    counted: Any = _Counted(stream)
    try:
        while isinstance(message := read_frame(counted), dict) and "kind" in message:
            messages.put({"case": None, **message})
    except Exception:  # an end in the middle, forged bytes, too much of everything: all are an end
        pass
    messages.put(None)


class _Counted:
    """A stream that ends after MAX_FRAME_BYTES: what a child says in all is no more than what it may say at once."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._left = stream, MAX_FRAME_BYTES

    def read(self, size: int) -> bytes:
        data = self._stream.read(min(size, self._left))
        self._left -= len(data)
        return data


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

    def __init__(self, jail: Jail | None = None) -> None:
        self._process = subprocess.Popen(
            _python("from checks.sandbox.child import main_spawned; main_spawned()", jail),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            start_new_session=HAS_FORK, env=_environment(jail),
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

    def __init__(self, jail: Jail | None = None) -> None:
        self.owner, self.jail = os.getpid(), jail
        self._root = hold("jail") if jail and jail.namespaces else None
        self._control, theirs = socket.socketpair()
        self._pending, self._jobs, self._ready = b"", 0, False
        code = f"from checks.sandbox.forkserver import main; main({theirs.fileno()}, {PRELOAD!r})"
        command = _python(code, jail, self._root.path if self._root else None)
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], start_new_session=True, env=_environment(jail),
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

    def wait(self, job: int, seconds: float) -> tuple[int, float] | None:
        """Exit status and CPU seconds of a job that has ended."""
        while (message := self._read(seconds)) is not None:
            if message.get("job") == job:
                return int(message["status"]), message["cpu"]
        return None

    def _read(self, seconds: float) -> dict[str, float] | None:
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
            if self._root:
                self._root.remove()


@dataclass
class _Forked(_Job):
    server: _ForkServer
    number: int

    def kill(self) -> None:
        self.server.kill(self.number)

    def wait(self, seconds: float) -> int | None:
        ended = self.server.wait(self.number, seconds)
        if ended is None:
            return None
        status, self.cpu_seconds = ended
        return status


_one_at_a_time = threading.Lock()
_the_server: _ForkServer | None = None


def _server(jail: Jail | None = None) -> _ForkServer:
    global _the_server
    if _the_server is not None and _the_server.jail != jail:
        close_server()
    if _the_server is None or not _the_server.alive():
        _the_server = _ForkServer(jail)
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


def _python(code: str, jail: Jail | None = None, root: str | None = None) -> list[str]:
    """This Python, finding modules where this process finds them (in a jail: where it says), running `code`. With a `root` the
    process goes behind the jail's walls first: by a file of its own, since the jail's path is of inside."""
    if jail is None:
        path = [str(ROOT), *(p for p in sys.path if p)]
        return [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {code}"]
    walls = f"import runpy; runpy.run_path({WALLS!r})['enter'](**{jail.walls(root)!r}); " if root else ""
    # -S: no .pth file brings back what the path leaves out.
    return [sys.executable, "-S", "-c", f"{walls}import sys; sys.path[:] = {list(jail.path)!r}; {code}"]


def _environment(jail: Jail | None = None) -> dict[str, str]:
    inherited = dict(os.environ) if jail is None else jail.environ()
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"} | (
        # macOS stops a forked process that uses Apple's frameworks unless it is told that this is meant.
        {"OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"} if sys.platform == "darwin" else {}
    )
