"""nbval over the rebuilt notebook, behind the same walls: does the student's work carry the whole lab, its experiments shrunk?

It counts nothing. The points come from the checks; here the student's code runs in the notebook's kernel beside the public
checks, as it does at home, and what is kept of a cell is a fixed word.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from checks.authoring.source import ROOT
from checks.grading.isolation import has_namespaces
from checks.grading.one import Task, official, rebuilt_text
from checks.grading.points import Grader
from checks.grading.records import CellResult, CellStatus
from checks.sandbox.folders import hold
from checks.sandbox.jail import HOME, Jail, python_folders
from checks.sandbox.sandbox import HAS_FORK, WALLS

COURSE, WORK = "/course", "/work-on"
CELL_SECONDS, ALL_SECONDS, CPU_SECONDS, MEMORY_BYTES = 180, 900, 900, 12 << 30
_RESULT = "cells.xml"


def run_cells(grader: Grader, task: Task) -> tuple[CellResult, ...]:
    """What nbval says of each code cell of the rebuilt notebook."""
    text = rebuilt_text(task)
    if text is None:
        return ()
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    held = hold("nbval")
    try:
        notebook = Path(held.path, f"{official(task.lab).path.stem}.ipynb")
        notebook.write_text(text, encoding="utf-8")
        _run(Path(held.path), notebook.name)
        told = _read(Path(held.path, _RESULT))
    finally:
        held.remove()
    return tuple(_cell(cell, told.get(number)) for number, cell in enumerate(cells))


def _cell(cell: dict[str, object], told: tuple[CellStatus, str] | None) -> CellResult:
    metadata = cell.get("metadata")
    own = metadata.get("minivllm", {}) if isinstance(metadata, dict) else {}
    status, category = told or ("not_run", "the notebook did not come this far")
    return CellResult(str(cell["id"]), own.get("exercise"), status, category)


def _run(folder: Path, name: str) -> None:
    """pytest on the notebook, in `folder`; over when it is done, or its time is."""
    command = [
        sys.executable, "-m", "pytest", "--nbval-lax", f"--nbval-cell-timeout={CELL_SECONDS}", "-q", "-p", "no:cacheprovider",
        "-p", "no:randomly", f"--junitxml={_RESULT}", "--rootdir=.", name,
    ]  # fmt: skip
    inside = has_namespaces()
    where, home = (WORK, HOME) if inside else (str(folder), str(folder / "home"))
    environment = _environment(COURSE if inside else str(ROOT), home, where)
    root = hold("jail") if inside else None
    if root:
        walls = f"import runpy; runpy.run_path({WALLS!r})['enter'](**{_jail(folder).walls(root.path)!r}); "
    else:
        walls = ""
        os.makedirs(home, exist_ok=True)
    if HAS_FORK:
        go = f"import os; os.chdir({where!r}); os.execve({sys.executable!r}, {command!r}, {environment!r})"
        command = [sys.executable, "-S", "-c", f"{_LIMITS}; {walls}{go}"]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, start_new_session=HAS_FORK,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ALL_SECONDS)
    finally:
        if HAS_FORK:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        if root:
            root.remove()


_LIMITS = (
    "import resource as r; r.setrlimit(r.RLIMIT_CORE, (0, 0));"
    f" r.setrlimit(r.RLIMIT_CPU, ({CPU_SECONDS}, {CPU_SECONDS})); r.setrlimit(r.RLIMIT_AS, ({MEMORY_BYTES}, {MEMORY_BYTES}));"
    " r.setrlimit(r.RLIMIT_FSIZE, (64 << 20, 64 << 20))"
)


def _jail(folder: Path) -> Jail:
    """The clone without solutions, records and seeds; the models that were fetched, for reading."""
    seen = [(str(ROOT / name), f"{COURSE}/{name}") for name in ("checks", "minivllm", "labs", "pyproject.toml")]
    cache = _models()
    if cache.is_dir():
        seen.append((str(cache), f"{HOME}/.cache/minivllm"))
    seen += [(folder, folder) for folder in python_folders()]
    return Jail(path=(), visible=tuple(seen), writable=((str(folder), WORK),), size="256m")


def _models() -> Path:
    from minivllm.models.hub import cache_dir

    return Path(cache_dir())


def _environment(course: str, home: str, where: str) -> dict[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": home,
        "MINIVLLM_HOME": f"{home}/work",
        "MINIVLLM_FAST": "1",
        "MINIVLLM_CACHE": f"{home}/.cache/minivllm" if where == WORK else str(_models()),
        "PYTHONPATH": course,
        "PYTHONDONTWRITEBYTECODE": "1",
        "JUPYTER_PLATFORM_DIRS": "1",
        **threads,
    }


def _read(path: Path) -> dict[int, tuple[CellStatus, str]]:
    """(status, category) by the number of the code cell. The file comes from where the student's code ran: it is read as what
    it may be."""
    try:
        if path.stat().st_size > 32 << 20:
            return {}
        cases = list(ET.parse(path).getroot().iter("testcase"))
    except (OSError, ET.ParseError):
        return {}
    found = {}
    for case in cases:
        if number := re.search(r"(\d+)$", case.get("name", "")):
            found[int(number[1])] = _status(case)
    return found


def _status(case: ET.Element) -> tuple[CellStatus, str]:
    if case.find("skipped") is not None:
        return "skipped", ""
    failure = case.find("failure") if case.find("failure") is not None else case.find("error")
    if failure is None:
        return "passed", ""
    text = f"{failure.get('message', '')}{failure.text or ''}"[:20_000]
    if "CheckFailed" in text:
        return "failed", "its check was red"
    return "failed", "it took too long" if "Timeout" in text else "an error was raised"
