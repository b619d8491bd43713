"""The points of a submission: each exercise by its check's three functions, first with the public cases, then with hidden ones.

A child behind walls holds the student's cell and minivllm without that exercise's answer, and gets inputs; this process judges
what comes back. Two children an exercise: what the first saw and said may be shown to the student, so nothing hidden was ever
in it. Of the second only a fixed category is kept.

Half of the points are for the public cases, half for the hidden ones.
"""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from checks.exercises import Case, Row, check_of, table
from checks.exercises.evaluate import Grading, Report, evaluate
from checks.grading.copying import is_the_reference, remark, takes_the_answer
from checks.grading.isolation import forbidden, jail_for, tree_path
from checks.grading.rebuild import MAX_CELL, is_stub_text
from checks.grading.records import ExerciseResult, ExerciseStatus, Incident
from checks.grading.trees import Trees
from checks.sandbox.sandbox import Unavailable, close_server
from checks.sandbox.withheld import WORDS

PUBLIC_SHARE = 0.5
HIDDEN_ROUNDS = 2  # seeds
HIDDEN_SCALE = 3  # where the cases of an exercise can be made larger
# Where they cannot: numbers in and a number out, or one fixed situation. There hidden cases are others of the same size.
WITHOUT_SIZE = ("0.0", "0.1", "0.2", "3.4", "5.2", "6.1", "9.1", "10.1", "10.4")
_ENDS: dict[str, ExerciseStatus] = {"time": "time_limit", "memory": "memory_limit", "output": "output_limit", "exit": "crashed"}
_HIDDEN = {
    "time": "hidden tests: too slow, or it never ended",
    "memory": "hidden tests: too much memory",
    "output": "hidden tests: too much output",
    "exit": "hidden tests: it ended Python",
    "exception": "hidden tests: an error was raised",
}
_WRONG = "hidden tests: wrong result"


@dataclass(frozen=True)
class Grader:
    """What every submission of a run is graded with. `private` are folders of the run that no child may read."""

    trees: Trees
    secret: str
    private: tuple[str, ...] = ()

    @property
    def forbidden(self) -> tuple[str, ...]:
        return (*forbidden(), *self.private)

    def exercise(self, row: Row, source: str | None, worth: float) -> tuple[ExerciseResult, list[Incident]]:
        """The result for a cell's text (None: there is no such cell), and what the instructor should know."""
        if source is None:
            return ExerciseResult(row.id, 0.0, worth, "missing", "There is no cell for this exercise in the notebook."), []
        if len(source) > MAX_CELL:
            told = f"The cell has {len(source):,} characters; an answer has some thousand. It was not run."
            return ExerciseResult(row.id, 0.0, worth, "failed", told), [Incident("too_large", row.id, told)]
        if (reason := check_of(row).why_not()) and not is_stub_text(row.id, source):
            told = f"It cannot be checked on the machine that graded it: {reason}"
            return ExerciseResult(row.id, 0.0, worth, "error", told), [Incident("cannot_check", row.id, reason)]
        try:
            return self._exercise(row, source, worth)
        except Unavailable:
            told = "The code brought down the process that runs it."
            return ExerciseResult(row.id, 0.0, worth, "crashed", told), [Incident("tampering", row.id, told)]

    def _exercise(self, row: Row, source: str, worth: float) -> tuple[ExerciseResult, list[Incident]]:
        if taken := takes_the_answer(source, self.trees.withheld(row)):
            return _copied(row, worth, f"the cell takes {taken} from minivllm")
        public = self._run(row, source, None)
        status = _status(public)
        if status == "copied":
            return _copied(row, worth, self._reached_for(row))
        flags = (remark(row),) if is_the_reference(source, row) else ()
        incidents = [Incident(status, row.id)] if status in _ENDS.values() else []
        if status != "passed":
            said = public.verdict
            return ExerciseResult(row.id, 0.0, worth, status, said.message, category=said.category, flags=flags), incidents
        cases = hidden_cases(row, self.secret)
        hidden = self._run(row, source, cases) if cases else public
        if hidden.withheld:
            return _copied(row, worth, self._reached_for(row))
        if not hidden.passed:
            told = _HIDDEN.get(hidden.verdict.category, _WRONG)
            return ExerciseResult(row.id, PUBLIC_SHARE * worth, worth, "failed", "", told, flags=flags), incidents
        return ExerciseResult(row.id, worth, worth, "passed", flags=flags), incidents

    def _reached_for(self, row: Row) -> str:
        """How an answer was taken that the cell's text does not name: noticed while it ran."""
        answers = [f"{name} ({file})" for file, names in sorted(self.trees.withheld(row).items()) for name in sorted(names)]
        called = f"called minivllm's own {' or '.join(answers)}, or " if answers else ""
        return f"while it ran, the code {called}opened a file that has the answer in it"

    def _run(self, row: Row, source: str, cases: tuple[Case, ...] | None) -> Report:
        """In a child; once more with a new server of children if the first went down with it."""
        grading = Grading(jail_for(self.trees), tree_path(self.trees, row.id), self.forbidden, cases or public_cases(row))
        try:
            return evaluate(row, source, grading=grading)
        except Unavailable:
            close_server()
            return evaluate(row, source, grading=grading)


def _status(report: Report) -> ExerciseStatus:
    category = report.verdict.category
    if report.withheld or (not report.passed and WORDS in report.verdict.message):
        return "copied"
    if category == "not attempted":
        return "not_attempted"
    return "passed" if report.passed else _ENDS.get(category, "failed")


def _copied(row: Row, worth: float, how: str) -> tuple[ExerciseResult, list[Incident]]:
    told = f"No points: {how}. The exercise is to write it."
    return ExerciseResult(row.id, 0.0, worth, "copied", told), [Incident("copied", row.id, how)]


@lru_cache(maxsize=128)
def public_cases(row: Row) -> tuple[Case, ...]:
    return tuple(check_of(row).cases(0))


@lru_cache(maxsize=128)
def hidden_cases(row: Row, secret: str) -> tuple[Case, ...]:
    """The same cases functions with secret seeds, larger where they can be; without the cases that everybody has seen. The same
    for all students."""
    make: Any = check_of(row).cases
    larger = {"scale": HIDDEN_SCALE} if "scale" in inspect.signature(make).parameters else {}
    public = {repr(case) for case in public_cases(row)}
    found: dict[str, Case] = {}
    for number in range(HIDDEN_ROUNDS):
        for case in make(secret_number(secret, row.id, number), **larger):
            found.setdefault(repr(case), case)
    return tuple(case for text, case in found.items() if text not in public)


def secret_number(secret: str, *what: object) -> int:
    return int.from_bytes(hashlib.sha256(":".join(map(str, (secret, *what))).encode()).digest()[:6], "big")


def exercises_of(lab: str) -> list[Row]:
    return [row for row in table().values() if row.lab == lab]
