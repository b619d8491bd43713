"""check("2.1"), the last line of an exercise cell: green prints one line, red raises CheckFailed."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

from checks.exercises import Row, check_of, runner_of
from checks.exercises.evaluate import Report, before_running, evaluate
from checks.exercises.words import count, is_or_are, wrapped
from checks.sandbox.cell import name_of, own_source
from checks.sandbox.sandbox import HAS_FORK, Unavailable
from checks.student.engine import overtaken_by, save_answer
from checks.student.failure import CheckFailed, row_of
from checks.student.help import bind_reference
from checks.student.home import changing_progress, read_progress
from checks.student.notebook import calling_cell, names_in

_said_slow = False


def check(exercise: str, *, here: bool = False) -> None:
    """Check the exercise whose cell this is called from. Raises CheckFailed unless it is right.

    The cell runs by itself in another process, so nothing else in the notebook can help or disturb it. `here=True` runs the
    same cases in this kernel instead, without limits and without counting: for `breakpoint()` and `%debug`.
    """
    row = row_of(exercise)
    source, namespace = calling_cell(f'check("{exercise}")')
    if reason := check_of(row).why_not():
        print(f"Exercise {row.id} is skipped on this machine: it {reason} Nothing is counted; elsewhere it is checked.")
        return
    if here:
        _check_here(row, source, namespace)
        return
    if _is_skipped(row, source):
        bind_reference(row, namespace)
        print(f"Exercise {row.id} is skipped: {_functions(row)} is the reference.")
        return
    check_source(row, source, namespace)


def check_source(row: Row, source: str, namespace: dict[str, Any]) -> None:
    """Check the text of an exercise's cell and count it. Raises CheckFailed unless it is right."""
    _say_slow()
    try:
        report = evaluate(row, source, notebook=names_in(namespace))
    except Unavailable as error:
        raise CheckFailed(str(error)) from None
    except KeyboardInterrupt:
        raise CheckFailed(f"Exercise {row.id}: the check was interrupted. Run the cell to check it again.") from None
    if report.output:
        print(f"Your code printed, while it was checked:\n{report.output.rstrip()}\n")
    if not report.passed:
        _count_attempt(row)
        raise CheckFailed(_words(row, report)) from None
    _pass(row, source, report)


def _pass(row: Row, source: str, report: Report) -> None:
    told = f"Exercise {row.id} passed ({count(report.cases, 'case')})."
    try:
        save_answer(row, own_source(source))
        if row.file:
            told += f" {where(row)}"
    except ValueError as error:
        told += f" But my_engine keeps the reference: {error}"
    with changing_progress() as state:
        entry = state["exercises"].setdefault(row.id, {})
        entry.update(status="passed", attempts=entry.get("attempts", 0) + (entry.get("status") != "passed"))
    print(told)


def where(row: Row) -> str:
    if later := overtaken_by(row):
        return f"my_engine/{row.file} goes on with your answer{'s' if len(later) > 1 else ''} to {', '.join(later)}."
    return f"{_functions(row)} now in my_engine/{row.file}."


def _functions(row: Row) -> str:
    return " and ".join(name_of(f) for f in row.functions)


def _count_attempt(row: Row) -> None:
    with changing_progress() as state:
        entry = state["exercises"].setdefault(row.id, {"status": "tried"})
        if entry.get("status") != "passed":
            entry["attempts"] = entry.get("attempts", 0) + 1


def _is_skipped(row: Row, source: str) -> bool:
    skipped = read_progress()["exercises"].get(row.id, {}).get("status") == "skipped"
    verdict = before_running(row, source) if skipped else None
    return verdict is not None and verdict.category == "not attempted"


def _words(row: Row, report: Report) -> str:
    """The whole message. Its first line says that this is about the exercise, not about the notebook being broken."""
    verdict = report.verdict
    if verdict.category == "not attempted":
        return (
            f'Exercise {row.id}. {verdict.message}\nhint("{row.id}") gives a hint; skip("{row.id}") goes on with the reference.'
        )
    lines = [f"Exercise {row.id} is not right yet ({verdict.category})."]
    if report.call:
        lines += ["", f"    {report.call}"]
    lines += ["", wrapped(verdict.message), ""]
    left = len(check_of(row).hints) - read_progress()["exercises"].get(row.id, {}).get("hints", 0)
    if report.cases > 1 and report.call:
        lines.append(
            f"{report.right} of {report.cases} cases {is_or_are(report.right)} right; this is the smallest that is not."
        )
    lines.append(f'hint("{row.id}") gives a hint ({left} left).' if left > 0 else f'hint("{row.id}") repeats the hints.')
    return "\n".join(lines)


def _check_here(row: Row, source: str, namespace: dict[str, Any]) -> None:
    """All cases in this kernel, on the functions as the notebook has them now. Errors are left alone, so that %debug finds
    them."""
    verdict = before_running(row, source)
    if verdict:
        raise CheckFailed(f"Exercise {row.id}. {verdict.message}")
    runner = importlib.import_module(runner_of(row))
    if reason := getattr(runner, "why_not_here", lambda exercise: None)(row.id):
        raise CheckFailed(f"Exercise {row.id} {reason}")
    checks, run = check_of(row), runner.RUN[row.id]
    cases = checks.cases(0)
    module: Any = SimpleNamespace(**{name: value for name, value in namespace.items() if not name.startswith("_")})
    for index, case in enumerate(cases):
        verdict = checks.judge(case, run(module, case))
        if not verdict.passed:
            raise CheckFailed(_words(row, Report(verdict, case["call"], len(cases), index, "")))
    print(f"Exercise {row.id}: all {len(cases)} cases are right here, in this kernel. Take here=True away to have it counted.")


def _say_slow() -> None:
    global _said_slow
    if not HAS_FORK and not _said_slow:
        _said_slow = True
        print("Each check starts a new Python here and takes a few seconds: this system has no fork. (WSL is faster.)")
