"""hint, skip, solution, reset: what a student can ask for beside a check. need, answer_text: what a cell can ask for."""

from __future__ import annotations

import importlib
from typing import Any

from checks.authoring.source import Missing, answer_source
from checks.exercises import Row, check_of, has_checks, table
from checks.sandbox.cell import name_of, remember_text
from checks.student.engine import forget_answer
from checks.student.failure import CheckFailed, row_of
from checks.student.home import answers_dir, changing_progress
from checks.student.notebook import calling_namespace


def hint(exercise: str = "") -> None:
    """Print the hints opened so far and one more."""
    row = row_of(exercise)
    hints = check_of(row).hints
    with changing_progress() as state:
        entry = state["exercises"].setdefault(row.id, {"status": "tried"})
        entry["hints"] = opened = min(len(hints), entry.get("hints", 0) + 1)
    for number, text in enumerate(hints[:opened], start=1):
        print(f"Hint {number} of {len(hints)} for exercise {row.id}\n{text}\n")
    if opened == len(hints):
        print(f'That was the last one. solution("{row.id}") shows an answer; skip("{row.id}") goes on with it.')


def solution(exercise: str = "") -> None:
    """Print an answer. Yours need not look like it."""
    row = row_of(exercise)
    try:
        text = answer_source(row)
    except Missing as error:
        raise CheckFailed(str(error)) from None
    with changing_progress() as state:
        entry = state["exercises"].setdefault(row.id, {"status": "tried"})
        if entry.get("status") != "passed":  # afterwards it is reading, not help
            entry["solution_seen"] = True
    print(text.rstrip())


def skip(exercise: str = "") -> None:
    """Go on without solving it: its functions are the reference's, here and in my_engine. Solving it later still counts."""
    row = row_of(exercise)
    with changing_progress() as state:
        entry = state["exercises"].setdefault(row.id, {})
        if entry.get("status") == "passed":
            print(f"Exercise {row.id} is passed already: yours stays in use.")
            return
        entry["status"] = "skipped"
    bind_reference(row, calling_namespace())
    print(f"Exercise {row.id} is skipped: {' and '.join(name_of(f) for f in row.functions)} is the reference from here on.")


def reset(what: str = "") -> None:
    """Forget an exercise ("2.1") or a whole lab ("02"): what was passed, hints, predictions, answers. Cells are left as they
    are."""
    what = str(what).strip()
    if not what:
        raise CheckFailed('Which exercise, or which lab? reset("2.1") forgets an exercise, reset("02") a lab.')
    lab = what.zfill(2)
    rows = [row for row in table().values() if row.id == what or ("." not in what and row.lab == lab)]
    if not rows or not has_checks(rows[0].lab):
        raise CheckFailed(f'There is no exercise and no lab {what!r} here. Try reset("2.1") or reset("02").')
    with changing_progress() as state:
        for row in rows:
            state["exercises"].pop(row.id, None)
        if "." not in what:
            for kind in ("predictions", "quiz"):
                state[kind] = {k: v for k, v in state[kind].items() if k.partition(".")[0].zfill(2) != lab}
    for row in rows:
        forget_answer(row)
    print(f"Forgotten: {', '.join(row.id for row in rows)}. Your cells are as they were; running them counts again.")


def need(*exercises: str) -> None:
    """Make sure that a cell finds the functions of earlier exercises, also after a restart: as the notebook has them, else the
    answer that passed, else the reference. A line says so where it is not the notebook's."""
    namespace = calling_namespace()
    for row in map(row_of, exercises):
        names = list(dict.fromkeys(name_of(f).partition(".")[0] for f in row.functions))  # two methods have one class
        told, saved = " and ".join(names), answers_dir() / f"{row.id}.py"
        if not saved.is_file():
            try:
                bind_reference(row, namespace)
            except CheckFailed:  # handed out without solutions, and the engine has no such function
                raise CheckFailed(
                    f"This cell uses {told} of exercise {row.id}, which is not passed yet, and its answer is not part of what"
                    f" you were given. Pass it and run this cell again; cells that do not use {told} work without it."
                ) from None
            print(f"Exercise {row.id} is not passed yet: using the reference {told}.")
        elif not all(name in namespace for name in names):
            _execute(saved.read_text(encoding="utf-8"), f"<your answer to {row.id}>", namespace)
            print(f"Exercise {row.id} has passed, and its cell has not run since the kernel started: using your saved {told}.")


def answer_text(exercise: str) -> str:
    """The code of an exercise: what passed, else the reference's. For cells that set two answers side by side."""
    row = row_of(exercise)
    saved = answers_dir() / f"{row.id}.py"
    if saved.is_file():
        return saved.read_text(encoding="utf-8")
    try:
        return answer_source(row)
    except Missing as error:
        raise CheckFailed(str(error)) from None


def bind_reference(row: Row, namespace: dict[str, Any]) -> None:
    """Put the reference's functions under the exercise's names into a notebook."""
    names = [name_of(f).partition(".")[0] for f in row.functions]
    if row.file:
        module = vars(importlib.import_module("minivllm." + row.file.removesuffix(".py").replace("/", ".")))
    else:
        module = {"__name__": f"reference_{row.id}"}
        try:
            _execute(answer_source(row), f"<reference {row.id}>", module)
        except Missing as error:
            raise CheckFailed(str(error)) from None
    namespace.update({name: module[name] for name in names})


def _execute(text: str, filename: str, namespace: dict[str, Any]) -> None:
    remember_text(filename, text)
    exec(compile(text, filename, "exec", dont_inherit=True), namespace)
