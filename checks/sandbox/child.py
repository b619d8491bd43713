"""The child: compiles a cell as a module by itself and runs the cases on it. Everything here happens beside the student's code,
so nothing here may know an expected value; what goes wrong is described as data, and the parent finds the words.

Messages to the parent: {"kind": "started"} (the request is read), {"kind": "ready"} (the cell is loaded), then
per case {"kind": "result", "case", "output"} or {"kind": "problem", "case", ...}, then {"kind": "done"}. A problem before the
cases (the cell fails to load, a function is missing) has "case": None.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import importlib
import inspect
import io
import os
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from checks.sandbox import withheld
from checks.sandbox.cell import VERBS, name_of, own_statements, parse_parameters, remember_text
from checks.sandbox.jail import deny_calls
from checks.sandbox.plain import read_frame, write_frame


def serve(frames: BinaryIO) -> None:
    """Answer one request on `frames`, then return. Keys of the request: source, filename, functions (signatures), runner (a
    module with RUN), exercise, cases, tree, strict, forbidden, cpu_seconds, memory_bytes."""
    request = read_frame(frames)
    if request is None:
        return
    warnings.simplefilter("ignore")  # a library's warning is not the student's business, and costs nothing
    limit_resources(request["cpu_seconds"], request["memory_bytes"], lambda: write_frame(frames, {"kind": "memory"}))
    if request["strict"]:
        limit_the_rest()
        deny_calls()
    if request["tree"]:
        sys.path.insert(0, request["tree"])
    if request["forbidden"]:
        withheld.guard(request["forbidden"])
    write_frame(frames, {"kind": "started"})
    module = types.ModuleType("student_cell")
    module.__file__ = request["filename"]
    sys.modules["student_cell"] = module  # dataclasses look their module up
    runner = importlib.import_module(request["runner"])
    getattr(runner, "prepare", lambda exercise: None)(request["exercise"])  # before the cell imports anything
    problem = load(module, request) or missing_function(module, request["functions"])
    if problem:
        write_frame(frames, {"kind": "problem", "case": None, "withheld": bool(withheld.touched), **problem})
        return
    write_frame(frames, {"kind": "ready"})
    run = runner.RUN[request["exercise"]]
    for index, case in enumerate(request["cases"]):
        seed_everything(index)
        output, problem = guarded(functools.partial(run, module, case), request)
        answer = {"kind": "problem", **problem} if problem else {"kind": "result", "output": output}
        if withheld.touched:
            answer["withheld"] = True
        flush()
        try:
            write_frame(frames, {**answer, "case": index})
        except ValueError as error:  # the answer is too large to send
            write_frame(frames, {"kind": "problem", "case": index, "type": "ValueError", "message": str(error), "line": None})
    write_frame(frames, {"kind": "done"})


def load(module: types.ModuleType, request: dict[str, Any]) -> dict[str, Any] | None:
    """Execute the cell's own code in `module`, without its calls to this package. What it prints while loading has been printed
    by the notebook already."""
    remember_text(request["filename"], request["source"])
    tree = ast.parse(request["source"], request["filename"])
    tree.body = own_statements(tree)

    def execute() -> None:
        # As a notebook compiles a cell: it may await at its top level. This file's __future__ is not the student's.
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        waiting = eval(compile(tree, request["filename"], "exec", flags, dont_inherit=True), module.__dict__)
        if inspect.iscoroutine(waiting):
            asyncio.run(waiting)

    vars(module).update(dict.fromkeys(VERBS, lambda *_, **__: None))  # a call that is not at the top level means nothing here
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        return guarded(execute, request)[1]


def guarded(action: Callable[[], Any], request: dict[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    """(value, None), or (None, problem) if `action` raised, whatever it raised: also SystemExit and KeyboardInterrupt."""
    try:
        return action(), None
    except BaseException as error:
        return None, describe_error(error, request["filename"])


def describe_error(error: BaseException, filename: str) -> dict[str, Any]:
    """The error and the student's own lines of its traceback: [[line number, function], ...], outermost first."""
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:  # Triton's, around what was raised
        error = error.__cause__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == filename]
    try:
        message = str(error)
    except BaseException:
        message = "(its message cannot be shown)"
    module = type(error).__module__
    return {
        "type": type(error).__qualname__ if module in ("builtins", "student_cell") else f"{module}.{type(error).__qualname__}",
        "bases": [c.__name__ for c in type(error).__mro__],
        "message": message[:1000],
        "name": str(getattr(error, "name", None) or ""),
        "line": frames[-1].lineno if frames else None,
        "calls": [[f.lineno, f.name] for f in frames[-4:]],
    }


def missing_function(module: types.ModuleType, signatures: list[str]) -> dict[str, Any] | None:
    """The first wanted function that the cell does not define, or that cannot be called as wanted."""
    things = {name: _without_jit(thing) for name, thing in vars(module).items()}
    own = {name: f for name, f in things.items() if getattr(f, "__module__", None) == "student_cell" and callable(f)}
    found = [f"{name}{signature_of(f)}" for name, f in own.items() if not isinstance(f, type)]
    for wanted in signatures:
        name = name_of(wanted)
        target: Any = module
        for part in name.split("."):
            target = _without_jit(getattr(target, part, None))
        if not callable(target):
            others = _classes_instead(module, own, name) if "." in name else None
            if others is None:
                others = [f for f in found if name_of(f) not in map(name_of, signatures)]
            return {"type": "MissingFunction", "wanted": wanted, "found": others}
        if not accepts(target, wanted, is_method="." in name):
            return {"type": "WrongSignature", "wanted": wanted, "found": [f"{name}{signature_of(target)}"]}
    return None


def _without_jit(thing: Any) -> Any:
    """The function that @triton.jit was put on, which has the signature."""
    return (
        thing.fn if type(thing).__module__.startswith("triton.") and inspect.isfunction(getattr(thing, "fn", None)) else thing
    )


def _classes_instead(module: types.ModuleType, own: dict[str, Any], name: str) -> list[str] | None:
    """For a missing method: the methods its class has, or, if there is no such class, the cell's other classes."""
    class_name = name.partition(".")[0]
    if isinstance(found := own.get(class_name), type):
        methods = [m for m, f in vars(found).items() if inspect.isfunction(f) and m != "__init__"]
        return [f"{class_name}.{m}{signature_of(getattr(found, m))}" for m in methods]
    return [f"class {c}" for c, found in own.items() if isinstance(found, type)] or None


def signature_of(function: Any) -> str:
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):
        return "(...)"


def accepts(function: Any, wanted: str, is_method: bool) -> bool:
    """Whether `function` can be called the way `wanted` is written: its plain parameters by position, those after * by name."""
    parameters = parse_parameters(wanted)
    if parameters is None:
        return True
    positional = [None] * (len(parameters.posonlyargs) + len(parameters.args) - len(parameters.defaults) + is_method)
    try:
        inspect.signature(function).bind(*positional, **{a.arg: None for a in parameters.kwonlyargs})
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def seed_everything(seed: int) -> None:
    """The same noise for the same case, whatever ran before."""
    import random

    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def limit_resources(cpu_seconds: float, memory_bytes: int, report: Callable[[], None]) -> None:
    """Limits that hold from inside: CPU time (the kernel's SIGXCPU), address space (so that a hog gets MemoryError on its own
    line), and, where the system does not enforce that (macOS), a thread that watches the resident size."""
    try:
        import resource
    except ImportError:  # Windows: the parent's clock is the only limit
        return
    # Linux counts address space; a process that has imported torch starts with gigabytes of it.
    with contextlib.suppress(ValueError, OSError):
        seconds = max(1, round(time.process_time() + cpu_seconds))  # a spawned child has already paid for its imports
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform.startswith("linux"):
        with open("/proc/self/statm") as statm:
            in_use = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (in_use + memory_bytes, in_use + memory_bytes))
        return
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS

    def watch() -> None:
        while resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base < memory_bytes:
            time.sleep(0.05)
        report()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def limit_the_rest() -> None:
    """For code nobody has read: little on the disk, few open files, few threads."""
    try:
        import resource
    except ImportError:
        return
    for what, most in ((resource.RLIMIT_FSIZE, 1 << 20), (resource.RLIMIT_NOFILE, 128), (resource.RLIMIT_NPROC, 4096)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (most, most))


@contextlib.contextmanager
def _redirected(output_fd: int) -> Iterator[None]:
    """File descriptors 0, 1 and 2 as the student's code sees them: no input, and one pipe for all that it prints."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    try:
        yield
    finally:
        flush()


def main_forked(frames_fd: int, output_fd: int) -> None:
    """The life of a forked child. Never returns. A session of its own, so that one kill ends whatever it started too."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    code = 1
    try:
        with _redirected(output_fd), open(frames_fd, "r+b", buffering=0) as frames:
            serve(frames)
        code = 0
    finally:
        os._exit(code)


def main_spawned() -> None:
    """The life of a child where there is no fork: requests on stdin, messages on stdout, the student's output on stderr."""
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    messages = os.fdopen(os.dup(1), "wb", buffering=0)

    class Both(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def writable(self) -> bool:
            return True

        def read(self, size: int = -1) -> bytes | None:
            return requests.read(size)

        def write(self, data: Any) -> int:
            return messages.write(data) or 0

    with _redirected(2):
        import torch

        torch.set_num_threads(1)
        serve(Both())  # type: ignore[arg-type]
    os._exit(0)


if __name__ == "__main__":
    main_spawned()
