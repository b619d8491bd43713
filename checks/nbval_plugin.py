"""Points for one notebook, in pytest's summary:

    pytest --nbval-lax -p checks.nbval_plugin 04_paged_kv.ipynb

nbval runs the notebook as it is; the points are those of `python -m checks grade` without a secret: the answers are taken out
of the notebook and checked by the labs' own checks, so an edited check or a skipped cell changes nothing. The hidden
seed is drawn anew each time, unless MINIVLLM_HIDDEN_SEED says one.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

from checks.exercises import has_checks
from checks.grading.isolation import isolation
from checks.grading.one import Task, grade, read
from checks.grading.points import Grader, exercises_of
from checks.grading.records import Submission
from checks.grading.submissions import Found, recognize
from checks.grading.trees import Trees
from checks.sandbox.sandbox import close_server
from checks.student.ipynb import MAX_BYTES, Unreadable

_notebooks: dict[Path, None] = {}


def pytest_collection_modifyitems(items: list[Any]) -> None:
    _notebooks.update(dict.fromkeys(Path(item.path) for item in items if Path(item.path).suffix == ".ipynb"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for path in _notebooks:
        terminalreporter.section(f"points of {path.name}")
        for line in lines_of(path):
            terminalreporter.write_line(line)


def lines_of(path: Path) -> list[str]:
    """The points of a notebook, a line an exercise and question."""
    size = path.stat().st_size
    found = Found(path.stem, path.name, "", path.read_bytes() if size <= MAX_BYTES else None, size)
    try:
        lab = recognize(read(found)) or ""
    except Unreadable as error:
        return [f"It cannot be read: {error}."]
    if not lab or not has_checks(lab):
        return ["It is no lab of ours: neither its metadata nor its cells say which."]
    with tempfile.TemporaryDirectory(prefix="minivllm-grading-") as folder:
        trees = Trees(Path(folder, "trees").resolve())
        trees.build(exercises_of(lab))
        secret = os.environ.get("MINIVLLM_HIDDEN_SEED") or secrets.token_hex(16)
        try:
            return _told(grade(Grader(trees, secret), Task(found, lab, isolation())))
        finally:
            close_server()


def _told(graded: Submission) -> list[str]:
    lines = []
    for result in graded.exercises:
        said = result.hidden or result.message.partition("\n")[0]
        told = "passed" if result.status == "passed" else f"{result.status.replace('_', ' ')}{f': {said}' if said else ''}"
        lines.append(f"{result.exercise:6} {result.points:5g} of {result.max_points:g}  {told}")
    for answer in graded.quizzes:
        lines.append(f"{answer.question:6} {answer.points:5g} of {answer.max_points:g}  {answer.status.replace('_', ' ')}")
    lines += [
        f"note   {i.kind.replace('_', ' ')}: {i.cell_or_file}{f' ({i.detail})' if i.detail else ''}" for i in graded.incidents
    ]
    total = sum(r.points for r in graded.exercises) + sum(r.points for r in graded.quizzes)
    most = sum(r.max_points for r in graded.exercises) + sum(r.max_points for r in graded.quizzes)
    return [*lines, f"Lab {graded.lab}: {total:g} of {most:g} points ({graded.isolation})"]
