"""The process that children are forked from: torch is imported once, so a check costs 0.02 s and not 1.5 s.

It must never initialize CUDA (a fork of such a process cannot use it) and never start a thread (a fork would lose it), so it
imports torch, sets one thread, and then only forks. It lives in a session of its own: an interrupt meant for the kernel does
not reach it. It ends when the kernel's end of the control socket closes, which also happens when the kernel is killed.

Control messages, one JSON object a line. From the kernel: {"job": n} with two file descriptors (frames, output), or {"kill":
n}. To the kernel: {"up": pid} once, then per job {"job": n, "status": exit status, "cpu": seconds}.

For grading the process is behind walls from the start (jail.py); what a job left behind there is cleared away before the next.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket

from checks.sandbox.jail import clean_up


def main(control_fd: int, preload: list[str]) -> None:
    control = socket.socket(fileno=control_fd)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    import torch

    for module in preload:
        importlib.import_module(module)
    torch.set_num_threads(1)
    torch.softmax(torch.ones(2, 2), -1)  # what torch sets up at the first operation is set up once, here
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # only there so that the wake-up descriptor is written
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    jobs: dict[int, int] = {}  # job -> pid
    _send(control, {"up": os.getpid()})
    try:
        _loop(control, wake_read, jobs)
    finally:
        for pid in jobs.values():
            _kill(pid)


def _loop(control: socket.socket, wake_read: int, jobs: dict[int, int]) -> None:
    pending = b""
    fds: list[int] = []
    while True:
        ready, _, _ = select.select([control.fileno(), wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
            _reap(control, jobs)
        if control.fileno() not in ready:
            continue
        data, new_fds, _, _ = socket.recv_fds(control, 4096, 16)
        if not data:
            return
        fds += new_fds
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "kill" in message:
                if message["kill"] in jobs:  # not yet reaped, so the pid is still this child's
                    _kill(jobs[message["kill"]])
                continue
            frames_fd, output_fd = fds[:2]
            del fds[:2]
            jobs[message["job"]] = _fork(control, frames_fd, output_fd, wake_read)
            os.close(frames_fd)
            os.close(output_fd)


def _fork(control: socket.socket, frames_fd: int, output_fd: int, wake_read: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        control.close()
        os.close(wake_read)
        from checks.sandbox.child import main_forked

        main_forked(frames_fd, output_fd)
    finally:
        os._exit(1)


def _reap(control: socket.socket, jobs: dict[int, int]) -> None:
    for job, pid in list(jobs.items()):
        done, status, used = os.wait4(pid, os.WNOHANG)
        if done:
            _kill(pid, group_only=True)  # whatever it started and left behind
            del jobs[job]
            if not jobs:
                clean_up()
            cpu = used.ru_utime + used.ru_stime
            _send(control, {"job": job, "status": os.waitstatus_to_exitcode(status), "cpu": cpu})


def _kill(pid: int, group_only: bool = False) -> None:
    # Before the child's setsid there is no group of that number yet, so the process itself is killed too.
    for kill in (os.killpg,) if group_only else (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _send(control: socket.socket, message: dict[str, float]) -> None:
    with contextlib.suppress(OSError):  # the kernel is gone; the next read says so
        control.sendall(json.dumps(message).encode() + b"\n")
