"""How much is between a student's code and the machine: a container, namespaces, or only limits. Found out once a run, and
written into every result.

With namespaces (Linux, where the system lets an ordinary user make them) a child sees Python, the trees of trees.py and an
empty home, and no network. Without, the system call filter and the limits of checks/sandbox are all there is: results say "not
isolated". `--container` runs the whole of grading in a container, in which the same is done again as far as it can be.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from checks.grading.records import Isolation
from checks.grading.trees import FORBIDDEN, Trees
from checks.sandbox.jail import HOME, Jail, namespaces_allowed, python_folders

IN_CONTAINER = "MINIVLLM_GRADING_CONTAINER"  # set by the recipe


@lru_cache(maxsize=1)
def has_namespaces() -> bool:
    if os.environ.get("MINIVLLM_GRADING_NAMESPACES") == "0":  # to see what remains without
        return False
    with tempfile.TemporaryDirectory() as root:
        return namespaces_allowed(root)


def in_container() -> bool:
    return bool(os.environ.get(IN_CONTAINER))


def isolation() -> Isolation:
    """What stands around the children of this run."""
    if in_container():
        return "container"
    return "namespaces" if has_namespaces() else "not isolated"


def libraries() -> list[str]:
    """Where this Python's own and installed packages are. Not the rest of its path: this clone, the folder grading was started
    in, whatever PYTHONPATH names."""
    homes = tuple(f"{folder}/" for folder in python_folders())
    places = [os.path.abspath(p) for p in sys.path if p]
    return [p for p in places if (p + "/").startswith(homes) or Path(p).name in ("site-packages", "dist-packages")]


SEEN_AT = "/grading"  # where the trees are in the jail


def jail_for(trees: Trees) -> Jail:
    """The jail for an exercise's children. Without namespaces the home is an empty folder on the disk."""
    inside = has_namespaces()
    home = HOME if inside else str(trees.folder / "home")
    if not inside:
        os.makedirs(home, exist_ok=True)
    return Jail(
        path=(tree_path(trees, trees.machine.name), *libraries()),
        visible=((str(trees.folder), SEEN_AT),) if inside else (),
        masked=installed() if inside else (),
        # An arena of memory for every thread would use up the limit on address space.
        environment=(("HOME", home), ("MINIVLLM_HOME", home), ("MALLOC_ARENA_MAX", "1"), ("CUDA_VISIBLE_DEVICES", "")),
        namespaces=inside,
    )


def tree_path(trees: Trees, name: str) -> str:
    """The path of a tree as a graded child sees it."""
    return f"{SEEN_AT}/{name}" if has_namespaces() else str(trees.folder / name)


def installed() -> tuple[str, ...]:
    """Copies of the engine that are installed beside other packages."""
    return tuple(place for path in libraries() if os.path.isdir(place := os.path.join(path, "minivllm")))


def forbidden() -> tuple[str, ...]:
    """Folders whose files a graded child may not open: all that holds an answer."""
    return (*FORBIDDEN, *installed())


def close_memory() -> None:
    """This process holds expected values: on Linux, no other process of the same user may read its memory from here on."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


@contextmanager
def narrowed_environment() -> Iterator[None]:
    """Libraries that make threads see one core from here on."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
