"""Temporary folders that are found again after a kill: each belongs to the process that made it, which holds a lock on it as
long as it lives. `sweep` removes those that nobody holds any more, and no other, however many graders run at once.

Imports the standard library alone: it is beside the code of students.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: nothing is locked there, and nothing swept
    fcntl = None  # type: ignore[assignment]

_PREFIX = "minivllm-held-"
_TRIES = 5


@dataclass(frozen=True)
class Held:
    """A folder in the system's temporary one, this process's until `remove` or its end."""

    path: str
    _lock: int | None

    def remove(self) -> None:
        """The folder goes first: what has no lock and is still there would be another's to sweep."""
        _clear(self.path)
        if self._lock is not None:
            os.close(self._lock)


def hold(what: str) -> Held:
    """A new folder; `what` is a word for its name. Raises OSError where none can be made."""
    for _ in range(_TRIES):
        path = tempfile.mkdtemp(prefix=f"{_PREFIX}{what}-")
        lock = _locked(path) if fcntl is not None else None
        if os.path.isdir(path) and (lock is not None or fcntl is None):
            return Held(path, lock)
        if lock is not None:  # a sweep came between the two lines, and took it for a dead one's
            os.close(lock)
        with contextlib.suppress(OSError):
            os.rmdir(path)
    return Held(tempfile.mkdtemp(prefix=f"{_PREFIX}{what}-"), None)  # no locks on this file system: nor can a sweep take one


def _locked(path: str) -> int | None:
    """A descriptor that holds the folder's lock (programs that are started do not get it); None if another has it, or it is
    gone."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def sweep() -> int:
    """Remove the folders of processes that were killed. Returns how many."""
    swept = 0
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")) if fcntl is not None else ():
        with contextlib.suppress(OSError):
            if path.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
        lock = _locked(str(path))
        if lock is not None:
            _clear(str(path))
            swept += not path.exists()
            os.close(lock)
    return swept


def _clear(path: str) -> None:
    """Never through a mount: what is seen there is somewhere else."""
    if not os.path.ismount(path):
        shutil.rmtree(path, ignore_errors=True)
