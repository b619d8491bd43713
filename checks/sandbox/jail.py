"""Walls around a process, for grading: code nobody has read runs behind them. Linux, and without a privilege.

`enter` puts this process into namespaces of its own: it sees its own processes, a file system of a few folders that cannot be
written, empty memory-backed /tmp and home, and no network. `deny_calls` is a system call filter for the process that runs a
student's code: no new programs or processes (so no fork bomb), no network, nobody else's memory, no signals to others. The
second works where the first is not allowed. Neither is a virtual machine: a hole in the kernel is a hole here.

Imports the standard library alone, since it runs before anything else is there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import shutil
import signal
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOME = "/home/student"
_SCRATCH = ("/tmp", HOME, "/dev/shm")
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 1 << 14, 1 << 18
_DETACH = 2  # umount2: now, whoever still uses it
_INSIDE = 1000  # user and group in the namespace: nobody special
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "nsswitch.conf", "fonts", "mime.types")
_DEVICES = ("null", "zero", "full", "random", "urandom")


@dataclass(frozen=True)
class Jail:
    """What is inside. `path` is the Python path there; `visible` are files and folders seen read-only, beside Python and the
    system's libraries: (where it is, where it is seen); `writable` are folders that may be written, likewise. `namespaces` is
    False where the system allows none: then everything is visible, and only the call filter, the limits and the path hold."""

    path: tuple[str, ...]
    visible: tuple[tuple[str, str], ...] = ()
    writable: tuple[tuple[str, str], ...] = ()
    masked: tuple[str, ...] = ()  # folders inside of which nothing is seen
    environment: tuple[tuple[str, str], ...] = ()
    namespaces: bool = True
    size: str = "64m"  # of each scratch folder

    def walls(self, root: str) -> dict[str, Any]:
        """The arguments of `enter`. Folders of the path that are seen elsewhere are among `visible` already."""
        seen = [inside for _, inside in self.visible]
        own = [p for p in (*python_folders(), *self.path) if not any(p == s or p.startswith(s + "/") for s in seen)]
        visible = [*((p, p) for p in _outermost(own)), *self.visible]
        return {
            "root": root,
            "visible": visible,
            "writable": list(self.writable),
            "masked": list(self.masked),
            "size": self.size,
        }

    def environ(self) -> dict[str, str]:
        return {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": HOME, "TMPDIR": "/tmp"} | dict(self.environment)


class NotAllowed(OSError):
    """The system does not let this process make namespaces, or not all of them."""


def python_folders() -> list[str]:
    """The folders this Python lives in, seen from any path to it."""
    found = {sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(sys.executable).parent)}
    found |= {str(Path(os.path.realpath(sys.executable)).parents[1])}
    return sorted(folder for folder in found if folder not in ("/", "/usr", "/bin", "/usr/bin"))


# ---------------------------------------------------------------------------------------------------------- namespaces


Places = Iterable[tuple[str, str]]


def enter(root: str, visible: Places, writable: Places, masked: Iterable[str], size: str) -> None:
    """Go behind the walls. Returns in a new process, the first of its namespace, without a single capability; the caller stays
    behind, waits, and ends as that process does. `root` is an empty folder. Raises NotAllowed; then nothing has changed that
    matters."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: else the files below are root's (a grader closes its memory)
    _do(libc.unshare(_NEWUSER | _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{_INSIDE} {uid} 1"), ("gid_map", f"{_INSIDE} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    pid = os.fork()
    if pid:
        _wait_for(pid)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not without the one that waits
    _loopback_up()
    _build_root(libc, root, visible, writable, masked, size)
    os.chdir("/")
    with contextlib.suppress(OSError), open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")  # nobody in here makes namespaces of their own
    _drop_capabilities(libc)


def _do(status: int, what: str) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise NotAllowed(number, f"{what}: {os.strerror(number)}")


def _wait_for(pid: int) -> None:
    """The rest of the life of the process outside."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os.kill(pid, signal.SIGKILL))
    os.closerange(3, 1 << 16)  # a pipe that is open here would never be seen to close
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _loopback_up() -> None:
    """127.0.0.1, for a notebook and its kernel. There is no other address."""
    import fcntl
    import socket

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        fcntl.ioctl(link, 0x8914, struct.pack("16sh22x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP


def _build_root(libc: Any, root: str, visible: Places, writable: Places, masked: Iterable[str], size: str) -> None:
    def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
        status = libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
        _do(status, f"mount {target}")

    def bind(path: str, seen_at: str, read_only: bool = True) -> None:
        target = root + seen_at
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if not os.path.exists(target):
                open(target, "x").close()
        mount(path, target, "", _BIND | _REC)
        if read_only:
            mount("", target, "", _BIND | _REMOUNT | _RDONLY | _NOSUID | _NODEV | _kept_flags(target))

    mount("none", "/", "", _REC | _PRIVATE)
    mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=4m,mode=755")
    for folder in _SCRATCH:
        os.makedirs(root + folder, exist_ok=True)
        mount("tmpfs", root + folder, "tmpfs", _NOSUID | _NODEV, f"size={size},mode=700")
    for folder in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if os.path.islink(folder):  # /bin -> usr/bin
            os.symlink(os.readlink(folder), root + folder)
        elif os.path.isdir(folder):
            bind(folder, folder)
    for path in (f"/etc/{name}" for name in _ETC):
        if os.path.exists(path):
            bind(path, path)
    for path in (f"/dev/{name}" for name in _DEVICES):
        bind(path, path, read_only=False)
    for path, seen_at in visible:
        if os.path.exists(path):
            bind(path, seen_at)
    for path, seen_at in writable:
        bind(path, seen_at, read_only=False)
    for path in masked:
        if os.path.isdir(root + path):
            mount("tmpfs", root + path, "tmpfs", _RDONLY | _NOSUID | _NODEV, "size=4k")
    Path(root, "etc/passwd").write_text(f"student:x:{_INSIDE}:{_INSIDE}::{HOME}:/bin/sh\n")
    os.makedirs(root + "/proc")
    mount("proc", root + "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    os.makedirs(root + "/.outside")
    _do(libc.pivot_root(root.encode(), (root + "/.outside").encode()), "pivot_root")
    os.chdir("/")
    _do(libc.umount2(b"/.outside", _DETACH), "umount")
    os.rmdir("/.outside")
    mount("", "/", "", _BIND | _REMOUNT | _RDONLY | _NOSUID | _NODEV)


def _outermost(paths: Iterable[str]) -> list[str]:
    """Without those that lie in another: one mount shows both. Absolute, as they are written (a link stays a link's path)."""
    kept: list[str] = []
    for path in sorted({os.path.abspath(p) for p in paths}):
        if not any(path.startswith(f"{above}/") for above in (*kept, "/usr")):
            kept.append(path)
    return kept


def _kept_flags(path: str) -> int:
    """The flags of a mount that a remount in a namespace may not take away."""
    has = os.statvfs(path).f_flag
    told = ((_NOEXEC, 8), (1024, 1024), (2048, 2048), (1 << 21, 4096))  # noexec, noatime, nodiratime, relatime
    return sum(mount_flag for mount_flag, stat_flag in told if has & stat_flag)


def _drop_capabilities(libc: Any) -> None:
    """Nothing in here may mount, and no program gets it back."""
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    for capability in range(64):
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _do(libc.capset(header, none), "capset")


def namespaces_allowed(root: str) -> bool:
    """Whether `enter` works here, by trying it in a process that ends at once."""
    if not sys.platform.startswith("linux"):
        return False
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.closerange(1, 3)
            enter(root, [], [], [], "1m")
            os._exit(0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def clean_up() -> None:
    """After a job, by the first process of the namespace: nothing a student's code started or wrote is left for the next."""
    if os.getpid() != 1 or os.environ.get("HOME") != HOME:  # not behind walls: nothing here is ours to clear away
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0)[0]:
            pass
    with open("/proc/self/mounts") as mounts:
        kinds = {fields[1]: fields[2] for fields in map(str.split, mounts)}  # of several on a place the last is what one sees
    for folder in _SCRATCH:
        if kinds.get(folder) == "tmpfs":
            _empty(folder)


def _empty(folder: str) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False) and not os.path.ismount(entry.path):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(entry.path)


# ---------------------------------------------------------------------------------------------------- system call filter

# Per machine: its number for seccomp, the two calls that make processes the old way (None: it has none), then by name.
_NAMES = (
    "clone", "clone3", "execve", "execveat", "kill", "tgkill", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "socket",
    "ptrace", "process_vm_readv", "process_vm_writev", "pidfd_open", "pidfd_send_signal", "unshare", "setns", "mount",
    "shmget", "msgget", "semget", "mq_open", "add_key", "request_key", "keyctl", "bpf", "userfaultfd", "io_uring_setup",
)  # fmt: skip
_MACHINES = {
    "x86_64": (
        0xC000003E, (57, 58),
        (56, 435, 59, 322, 62, 234, 200, 129, 297, 41, 101, 310, 311, 434, 424, 272, 308, 165,
         29, 68, 64, 240, 248, 249, 250, 321, 323, 425),
    ),
    "aarch64": (
        0xC00000B7, (),
        (220, 435, 221, 281, 129, 131, 130, 138, 240, 198, 117, 270, 271, 434, 424, 97, 268, 40,
         194, 186, 190, 180, 217, 218, 219, 280, 282, 425),
    ),
}  # fmt: skip
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_SPECIAL = ("clone", "clone3", "kill", "tgkill", "socket")  # allowed for some arguments, or refused with another error
_THREAD, _AF_UNIX = 0x10000, 1


def deny_calls() -> bool:
    """Filter this process's system calls from here on, and those of everything it starts. False where there is no filter (not
    Linux, another machine, an old kernel)."""
    machine = _MACHINES.get(platform.machine()) if sys.platform.startswith("linux") else None
    if machine is None:
        return False
    program = b"".join(struct.pack("HBBI", *line) for line in _program(*machine))
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(program)
    filter_ = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    libc.prctl(38, 1, 0, 0, 0)
    return bool(libc.prctl(22, 2, filter_, 0, 0) == 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def _program(architecture: int, forks: tuple[int, ...], numbers: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """Lines of classic BPF: (operation, lines to skip if it holds, if not, value). The data it reads: the call's number at 0,
    the machine at 4, arguments from 16 on, 8 bytes each."""
    number = dict(zip(_NAMES, numbers, strict=True))
    refuse = (_RETURN, 0, 0, _ERROR | errno.EPERM)
    allow = (_RETURN, 0, 0, _ALLOW)

    def only_if(call: str, argument: int, operation: int, value: int) -> list[tuple[int, int, int, int]]:
        test = [(_LOAD, 0, 0, 16 + 8 * argument), (operation, 0, 1, value), allow, refuse]
        return [(_EQUAL, 0, len(test), number[call]), *test]

    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    lines += [(_AT_LEAST, 0, 1, 0x40000000), refuse]  # x86's second table of the same calls
    for plain in (*forks, *(n for name, n in number.items() if name not in _SPECIAL)):
        lines += [(_EQUAL, 0, 1, plain), refuse]
    lines += [(_EQUAL, 0, 1, number["clone3"]), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)]  # libc then asks for clone
    lines += only_if("clone", 0, _ANY_BIT, _THREAD)
    lines += only_if("kill", 0, _EQUAL, os.getpid())
    lines += only_if("tgkill", 0, _EQUAL, os.getpid())
    lines += only_if("socket", 0, _EQUAL, _AF_UNIX)
    return [*lines, allow]
