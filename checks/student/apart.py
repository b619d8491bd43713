"""Checks in cells of their own, below the answer: the form that nbgrader wants (python -m checks release --nbgrader).

nbgrader gives a check's cell its points unless the cell raises, *or writes anything to stderr*: a warning of a library would
cost all of them. So nothing written there while a check runs, by Python or by a library in C, gets out. And nothing passes here
that was not done: not a skipped exercise, nor one that this machine cannot check.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from typing import Any

from checks.exercises import Row, check_of
from checks.exercises.evaluate import before_running
from checks.sandbox.cell import find_function, name_of
from checks.student.checking import check_source
from checks.student.failure import CheckFailed, row_of
from checks.student.home import read_progress
from checks.student.notebook import calling_namespace, current_shell
from checks.student.quiz import find_question

FORMULA = "a formula"  # what quiz() notes of one

_home: tempfile.TemporaryDirectory[str] | None = None  # removed when the kernel ends


def ready_to_grade() -> None:
    """In a lab's first cell: where nbgrader runs the notebook, it starts with an empty folder of its own, so that no student
    has what another has passed. Elsewhere it does nothing."""
    global _home
    if os.environ.get("NBGRADER_EXECUTION"):
        _home = tempfile.TemporaryDirectory(prefix="minivllm-")
        os.environ["MINIVLLM_HOME"] = _home.name


def check_answer(exercise: str) -> None:
    """Check the answer that stands in the cell above. Raises CheckFailed unless it is right."""
    row, namespace = row_of(exercise), calling_namespace()
    with quiet_stderr():
        if reason := check_of(row).why_not():
            raise CheckFailed(f"Exercise {row.id} cannot be checked on this machine: it {reason}")
        source = _latest(row)
        if (verdict := before_running(row, source)) is not None:
            raise CheckFailed(f"Exercise {row.id}. {verdict.message}")
        check_source(row, source, namespace)


def answered(question: str) -> None:
    """Raises CheckFailed if a quiz question has no answer yet. A choice counts right or wrong, and so does a plain number: the
    numbers drawn for a student stay on the student's machine. A formula has to be right."""
    asked = find_question(question)
    given = read_progress()["quiz"].get(asked.id)
    if given is None:
        raise CheckFailed(f"{asked.id} is not answered yet: write your answer in the cell above, and run it.")
    if given["answer"] == FORMULA and not given["right"]:
        raise CheckFailed(f"{asked.id}: the formula does not give the right number.")
    print(f"{asked.id} is answered.")


def _latest(row: Row) -> str:
    """The text of the cell that ran last of those which define the exercise's functions."""
    shell = current_shell()
    inputs: list[Any] = shell.user_ns.get("In", []) if shell is not None else []
    for text in reversed(inputs):
        try:
            tree = ast.parse(str(text))
        except (SyntaxError, ValueError):
            continue
        if any(find_function(tree, name_of(function)) is not None for function in row.functions):
            return str(text)
    raise CheckFailed(f"Exercise {row.id}: run the cell with your answer first; it stands above this one.")


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Nothing that is written to stderr in this block is seen: neither through sys.stderr nor through the file descriptor."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.ExitStack() as restore:
        with contextlib.suppress(OSError):  # a process without stderr has nothing to silence
            kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 2)
            os.close(nowhere)
            restore.callback(os.close, kept)
            restore.callback(os.dup2, kept, 2)
        yield
