"""python -m checks restore labs/*.ipynb: everything that was earned, out of the notebooks alone.

The notebooks are the truth, so a disk that forgets loses nothing that was downloaded: each exercise's cell is checked again,
what passes goes into my_engine/, and predictions and answers are noted again.
"""

from __future__ import annotations

import contextlib
import glob
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from checks.exercises import Row, has_checks, table
from checks.exercises.evaluate import before_running, evaluate
from checks.sandbox.cell import own_source
from checks.student.engine import save_answer
from checks.student.failure import CheckFailed
from checks.student.home import changing_progress, read_progress
from checks.student.ipynb import Notebook, Unreadable, answers_in, read_notebook, replies_in
from checks.student.quiz import OPEN, find_question, predict, quiz


def restore(paths: Sequence[Path], *, check: bool = True) -> bool:
    """Restore from these notebooks, and say of each what was found in it; where two answer the same, the later one counts.
    False if a file could not be read. With `check=False` an answer is taken as it stands."""
    readable = True
    for path in paths:
        try:
            notebook = read_notebook(path)
        except Unreadable as error:
            print(f"{path}: skipped, {error}.")
            readable = False
            continue
        rows = [row for row in table().values() if has_checks(row.lab) and answers_in(notebook, row)]
        name = f"Lab {notebook.lab}" if notebook.lab else "its metadata names no lab"
        print(f"{path} ({name})" + ("" if rows else ": no exercise is in it"))
        for row in rows:
            print(f"  {row.id:5} {_restore_exercise(notebook, row, check)}")
        told = list(_restore_replies(notebook))
        if told:
            print(f"  noted again: {', '.join(told)}")
    return readable


def _restore_exercise(notebook: Notebook, row: Row, check: bool) -> str:
    """Take the last of the exercise's cells that is right (without a check: the last that is written). Says how it went."""
    written = [text for text in answers_in(notebook, row) if not _is_untouched(row, text)]
    if not written:
        return "not attempted"
    told = ""
    for text in reversed(written):
        verdict = evaluate(row, text).verdict if check else before_running(row, text)
        if verdict is not None and not verdict.passed:
            told = told or f"not right yet ({verdict.category})"
            continue
        status = "passed" if check else "restored"
        kept = _keep(row, own_source(text), status)
        return {"passed": "passed", "restored": "taken as it stands, not checked"}[status] + kept
    return told


def _keep(row: Row, source: str, status: str) -> str:
    note = ""
    try:
        save_answer(row, source)
    except ValueError as error:
        note = f". But my_engine keeps the reference: {error}"
    with changing_progress() as state:
        state["exercises"].setdefault(row.id, {})["status"] = status
    return note


def _is_untouched(row: Row, text: str) -> bool:
    verdict = before_running(row, text)
    return verdict is not None and verdict.category == "not attempted"


def _restore_replies(notebook: Notebook) -> Iterator[str]:
    """Note predictions and answers again. Numbers are left out: whose they are is drawn for each student, and marked when the
    cell runs."""
    state = read_progress()
    for verb, question, answer in replies_in(notebook):
        if answer == OPEN or question in state["predictions"] or question in state["quiz"]:
            continue
        with contextlib.suppress(CheckFailed), contextlib.redirect_stdout(io.StringIO()):
            asked = find_question(question)
            if not asked.draw:
                (quiz if verb == "quiz" else predict)(question, answer)
                yield question


def expanded(names: Iterable[str]) -> list[Path]:
    """The files that are named, "labs/*.ipynb" too where the shell leaves that to us (Windows)."""
    return [Path(found) for name in names for found in (sorted(glob.glob(name)) if "*" in name else [name])]


def main(names: Sequence[str], *, check: bool) -> int:
    """`python -m checks restore`. Returns the exit status: 1 if a file could not be read, or there was none."""
    paths = expanded(names)
    if not paths:
        print(f"No file is named {' or '.join(names)}.")
    return 0 if restore(paths, check=check) and paths else 1
