"""Where a student's things lie, and how they are written: atomically, under a lock that all notebooks share.

    <home>/.progress/progress.json    what was passed, predicted, answered (small; read anew every time)
    <home>/.progress/answers/2.2.py   the cells that passed
    <home>/my_engine/                 the engine made from them (student/engine.py)
    <home>/results/                   what experiments measured

<home> is `$MINIVLLM_HOME`, or labs/ of this clone. A notebook that runs in solutions/ keeps its own, solutions/.home: running a
solution is not the student's work.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
_EMPTY: dict[str, Any] = {"version": 1, "student": "", "exercises": {}, "predictions": {}, "quiz": {}, "use": {}}
_locks: dict[Path, FileLock] = {}


def home() -> Path:
    if os.environ.get("MINIVLLM_HOME"):
        return Path(os.environ["MINIVLLM_HOME"]).expanduser().resolve()
    if Path.cwd().resolve() == ROOT / "solutions":
        return ROOT / "solutions" / ".home"
    return ROOT / "labs"


def answers_dir() -> Path:
    return home() / ".progress" / "answers"


def engine_dir() -> Path:
    return home() / "my_engine"


def results_dir() -> Path:
    return home() / "results"


def write_atomically(path: Path, text: str) -> None:
    """All of the file or nothing of it, whenever the process dies. Half a character, which JSON can spell and UTF-8 cannot, is
    written as it is spelled: \\ud800. Raises OSError naming `path`, on a full disk say; the file that was there stays."""
    try:
        _write_atomically(path, text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.write(text)
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp's files are private; these are ordinary ones
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def new_backup(stem: str, suffix: str) -> Path:
    """A path for a backup, named by the time, that is not there yet: two in a second, or a clock that was set back, must not
    overwrite one."""
    folder, stamp = home() / ".progress" / "backups", time.strftime("%Y%m%d-%H%M%S")
    names = (f"{stem}-{stamp}{more}{suffix}" for more in ("", *(f"-{i}" for i in range(2, 1000))))
    return next(folder / name for name in names if not (folder / name).exists())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def locked() -> FileLock:
    """The lock of this home, held across "read, change, write". The same process may take it again."""
    folder = home() / ".progress"
    folder.mkdir(parents=True, exist_ok=True)
    return _locks.setdefault(folder, FileLock(folder / "lock", timeout=30))


def read_progress() -> dict[str, Any]:
    """The student's state now. A file that cannot be read is set aside, not overwritten."""
    path = home() / ".progress" / "progress.json"
    state = copy.deepcopy(_EMPTY)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or not all(isinstance(found.get(k, v), type(v)) for k, v in _EMPTY.items()):
            raise ValueError("not a progress file")
        state |= found
    except FileNotFoundError:
        pass
    except ValueError:
        aside = path.with_suffix(".unreadable.json")
        with contextlib.suppress(OSError):
            os.replace(path, aside)
        print(f"Your progress file could not be read. It was set aside as {aside.name}; running your cells again restores it.")
    return state


@contextlib.contextmanager
def changing_progress() -> Iterator[dict[str, Any]]:
    """The state, to be changed in place; written back when the block ends without an error."""
    with locked():
        state = read_progress()
        state["student"] = state["student"] or uuid.uuid4().hex
        yield state
        write_atomically(home() / ".progress" / "progress.json", json.dumps(state, indent=1, sort_keys=True) + "\n")


def student_id() -> str:
    """A random name for this student, made once. It draws the numbers of graded questions."""
    found = read_progress()["student"]
    if not found:
        with changing_progress() as state:
            found = state["student"]
    return str(found)
