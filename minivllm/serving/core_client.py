"""CoreClient: the front end's hold on the engine core's process. It starts it, talks to it, and notices when it dies. Labs:
built by none. May not know HTTP, text, or torch.

It is a process of its own started from scratch, not a fork: a fork of a program with threads (torch's, a notebook's) is broken,
and nothing of the program that embeds it has to be importable in the child.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from minivllm.config import EngineConfig
from minivllm.serving import wire

logger = logging.getLogger("minivllm")

SILENCE_SECONDS = 30.0  # without a heartbeat, which comes every second: suspended, or something holds the interpreter
STUCK_SECONDS = 300.0  # in one step: the process lives, but a kernel or a replaced part does not come back
GRACE_SECONDS = 5.0  # from being asked to end to being killed


class EngineDeadError(RuntimeError):
    """The engine core's process has ended: nothing can be computed any more."""


class CoreClient:
    """One core. Belongs to the event loop that `start` was called in.

    on_death: called once, in that loop, if the process ends without being asked to.
    """

    def __init__(self, on_death: Callable[[EngineDeadError], None]) -> None:
        self._on_death = on_death
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: str | None = None  # of the sockets
        self._context: zmq.Context[Any] | None = None
        self._is_ready = False
        self._is_closing = False
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self.last_sign_of_life = 0.0
        self.step_seconds = 0.0  # of the step in progress, as of the last heartbeat
        self.dead: EngineDeadError | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, config: EngineConfig, components: Path | None) -> wire.Ready:
        """Start the process and wait until it serves. What it logs on the way is logged here. Raises what it failed with:
        ValueError where there is something to change, else EngineDeadError."""
        self._loop = asyncio.get_running_loop()
        commands, reports = self._addresses()
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PUSH)
        self._reports = zmq.asyncio.Socket(self._context, zmq.PULL)
        for socket in (self._commands, self._reports):
            socket.set_hwm(0)
            socket.linger = 0
        commands = self._bind(self._commands, commands)
        reports = self._bind(self._reports, reports)
        folder = None if components is None else str(components.resolve())
        self._process = subprocess.Popen([sys.executable, "-m", "minivllm.serving.engine_process"], stdin=subprocess.PIPE)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: the watcher tells
            self._process.stdin.write(wire.launch_line(wire.Launch(config, folder, commands, reports)))
            self._process.stdin.flush()
        threading.Thread(target=self._watch, args=(self._process,), daemon=True).start()
        try:
            async for report in self.reports():
                if isinstance(report, wire.Ready):
                    self._is_ready = True
                    return report
                if isinstance(report, wire.Failed):
                    self._is_closing = True
                    raise ValueError(report.error) if report.is_users else EngineDeadError(report.error)
            raise self.dead or EngineDeadError("The engine core ended before it was ready.")
        except BaseException:
            await self.close()
            raise

    def send(self, command: wire.Command) -> None:
        """Never waits: ZeroMQ queues it. A dead core's commands go nowhere; whoever waits for an answer has been told."""
        if self.dead is None and not self._is_closing:
            with contextlib.suppress(zmq.Again):  # nobody is at the other end: it is dying, and the watcher will tell
                self._commands.send(wire.encode(command), zmq.NOBLOCK)

    async def call(self, method: str) -> Any:
        """Ask the core; answered between its steps. Raises EngineDeadError."""
        if self.dead is not None:
            raise self.dead
        call_id = len(self._calls) and max(self._calls) + 1
        self._calls[call_id] = future = self._loop.create_future()
        try:
            self.send(wire.Call(call_id, method))
            return await future
        finally:
            del self._calls[call_id]

    async def reports(self) -> AsyncIterator[wire.Report]:
        """What the core says, without what is settled here: log lines, heartbeats, replies. Ends with its death."""
        while self.dead is None:
            try:
                report = wire.decode_report(await self._reports.recv())
            except (zmq.ZMQError, asyncio.CancelledError):
                if self.dead is None:
                    raise
                return
            self.last_sign_of_life = time.monotonic()
            if isinstance(report, wire.Progress):
                logger.log(report.level, "%s", report.text)
            elif isinstance(report, wire.Heartbeat):
                self.step_seconds = report.step_seconds
            elif isinstance(report, wire.Reply):
                if (future := self._calls.get(report.call_id)) is not None and not future.done():
                    future.set_result(report.value)
            else:
                yield report

    def what_is_wrong(self) -> str | None:
        """None while the core is well."""
        if self.dead is not None:
            return str(self.dead)
        silence = time.monotonic() - self.last_sign_of_life
        if silence > SILENCE_SECONDS:
            return f"The engine core (process {self.pid}) has given no sign of life for {silence:.0f} s."
        if self.step_seconds > STUCK_SECONDS:
            return f"The engine core (process {self.pid}) has been in one step for {self.step_seconds:.0f} s."
        return None

    async def close(self) -> None:
        """End the process, by force if it does not listen. Safe to call twice."""
        if self._process is not None and self._process.poll() is None:
            if self._is_ready:
                self.send(wire.Shutdown())
            self._is_closing = True
            if not self._is_ready:
                self._close_stdin()  # it is loading, and listens to nothing else
            deadline = time.monotonic() + GRACE_SECONDS
            while self._process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
        self._is_closing = True
        self._close_stdin()
        if self._context is not None:
            self._commands.close(0)
            self._reports.close(0)
            self._context.term()
            self._context = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _close_stdin(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """A thread that waits for the end of the process: nothing is quicker to know."""
        code = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._died, code)

    def _died(self, code: int) -> None:
        if self._is_closing:
            return
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self.dead = EngineDeadError(f"The engine core (process {self.pid}) {how}.")
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self.dead)
        self._reports.close(0)  # `reports` waits on it
        self._on_death(self.dead)

    def _addresses(self) -> tuple[str, str]:
        if os.name == "nt" or not zmq.has("ipc"):
            return "tcp://127.0.0.1:*", "tcp://127.0.0.1:*"
        self._folder = tempfile.mkdtemp(prefix="minivllm-")  # short, and for this user only: a socket's path has 107 characters
        return f"ipc://{self._folder}/commands", f"ipc://{self._folder}/reports"

    @staticmethod
    def _bind(socket: Any, address: str) -> str:
        socket.bind(address)
        return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
