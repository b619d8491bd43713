"""One student's notebook of one lab, graded: bytes in, a record out."""

from __future__ import annotations

import errno
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import nbformat

from checks.authoring.build import build
from checks.grading.points import Grader, exercises_of
from checks.grading.questions import mark
from checks.grading.rebuild import Rebuilt, rebuild
from checks.grading.records import GRADER_ERROR, ExerciseResult, ExerciseStatus, Incident, Isolation, QuizResult, Submission
from checks.grading.submissions import Found, kind_of, version_of
from checks.grading.worth import source_of, worth
from checks.student.ipynb import Notebook, Unreadable, parse_notebook
from checks.student.quiz import find_question


@dataclass(frozen=True)
class Task:
    """What is to be graded. `lab` is "" where it could not be told; `notes` were found out on the way. With `only` (an
    exercise) everything else of `before` stays."""

    found: Found
    lab: str
    isolation: Isolation
    student_id: str | None = None
    notes: tuple[Incident, ...] = ()
    only: str | None = None
    before: Submission | None = None


@lru_cache(maxsize=16)
def official(lab: str) -> Notebook:
    """The lab as it is handed out, built from its source: what lies in labs/ may be somebody's own work."""
    source = source_of(lab)
    return parse_notebook(Path(f"{source.name}.ipynb"), nbformat.writes(build(source)[1]))  # type: ignore[no-untyped-call]


def read(found: Found) -> Notebook:
    """Raises Unreadable, saying why."""
    if found.problem:
        raise Unreadable(found.problem)
    if found.data is None:
        raise Unreadable(f"it has {found.size / 1e6:.0f} MB; clear its outputs and save it again")
    try:
        text = found.data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Unreadable("it is not text in UTF-8") from None
    return parse_notebook(Path(found.name), text)


def grade(grader: Grader, task: Task) -> Submission:
    """Never raises for anything that is in a submission: a fault of grading itself is a record too, and the others go on.
    Raises OSError only where the disk is full, which would be the fault of every submission that comes after."""
    try:
        return _grade(grader, task)
    except Exception as error:
        if is_full(error):
            raise
        return not_graded(task, type(error).__name__)


def is_full(error: Exception) -> bool:
    """Whether it says that there is no room left: on the disk, or for this user."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _grade(grader: Grader, task: Task) -> Submission:
    try:
        notebook = read(task.found)
    except Unreadable as error:
        return _unreadable(task, str(error))
    if not task.lab:
        unknown = Incident("unknown_lab", task.found.name, "neither its metadata nor its cells say which lab it is")
        incidents = [*task.notes, unknown]
        return Submission(task.found.student, "", "", task.found.name, incidents=tuple(incidents), isolation=task.isolation)
    rebuilt = rebuild(official(task.lab), notebook)
    incidents = [*task.notes, *_about(notebook, task.lab, task.found.name), *rebuilt.incidents]
    points = worth(task.lab)
    exercises: list[ExerciseResult] = []
    kept = {result.exercise: result for result in task.before.exercises} if task.before and task.only else {}
    for row in exercises_of(task.lab):
        if row.id not in points:
            continue
        if row.id in kept and row.id != task.only:
            exercises.append(kept[row.id])
            continue
        result, told = grader.exercise(row, rebuilt.sources.get(row.id), points[row.id])
        exercises.append(result)
        incidents += told
    if task.before and task.only:
        others = [i for i in task.before.incidents if i.cell_or_file != task.only]
        incidents = [*others, *(i for i in incidents if i.cell_or_file == task.only)]
        quizzes = task.before.quizzes
    else:
        quizzes = _quizzes(grader, task, rebuilt, points)
    return Submission(
        student=task.found.student,
        lab=task.lab,
        lab_version=version_of(notebook),
        file=task.found.name,
        exercises=tuple(exercises),
        quizzes=quizzes,
        nbval=task.before.nbval if task.before and task.only else (),
        incidents=tuple(dict.fromkeys(incidents)),
        isolation=task.isolation,
    )


def _quizzes(grader: Grader, task: Task, rebuilt: Rebuilt, points: dict[str, float]) -> tuple[QuizResult, ...]:
    asked = [name for name in points if "q" in name]
    return tuple(mark(grader, find_question(name), rebuilt.answers.get(name), points[name], task.student_id) for name in asked)


def _about(notebook: Notebook, lab: str, name: str) -> list[Incident]:
    """What is odd about the file as a whole."""
    found = []
    if notebook.lab != lab:
        found.append(Incident("renamed", name, f"its metadata names no lab; by its exercises it is Lab {lab}"))
    here, wanted = version_of(notebook), version_of(official(lab))
    if here and here != wanted:
        found.append(Incident("wrong_version", name, f"version {here}; graded as version {wanted}"))
    if kind_of(notebook) == "solution":
        found.append(Incident("solution_notebook", name, "it is the solution notebook, or was made from it"))
    if notebook.raw.get("nbformat_minor") != 5 or any(not cell.id for cell in notebook.cells):
        found.append(Incident("old_format", name, "cells without ids; told apart by what is in them"))
    return found


def not_graded(task: Task, why: str) -> Submission:
    """The grader's own fault, to be looked at and run again."""
    told = Incident(GRADER_ERROR, task.found.name, f"grading stopped with {why}; its points are not the student's fault")
    return _without_points(task, "error", "It could not be graded. Your instructor has been told.", told)


def _unreadable(task: Task, why: str) -> Submission:
    kind = {"it is empty": "empty", "it is not JSON": "not_json"}.get(why.partition(",")[0], "unreadable")
    if task.found.data is None:
        kind = "too_large"
    told = Incident(kind, task.found.name, why[:300])
    return _without_points(task, "missing", f"The file could not be read: {why}.", told)


def _without_points(task: Task, status: ExerciseStatus, message: str, incident: Incident) -> Submission:
    """No points, and the same maximum as for everybody."""
    points = worth(task.lab) if task.lab else {}
    rows = exercises_of(task.lab) if task.lab else []
    return Submission(
        student=task.found.student,
        lab=task.lab,
        lab_version="",
        file=task.found.name,
        exercises=tuple(ExerciseResult(r.id, 0.0, points[r.id], status, message) for r in rows if r.id in points),
        quizzes=tuple(QuizResult(name, 0.0, most, "not_answered") for name, most in points.items() if "q" in name),
        incidents=(*task.notes, incident),
        isolation=task.isolation,
    )


def rebuilt_text(task: Task) -> str | None:
    """The rebuilt notebook as a file's text, for nbval. None if there is nothing to rebuild."""
    try:
        notebook = read(task.found)
    except Unreadable:
        return None
    return json.dumps(rebuild(official(task.lab), notebook).raw) if task.lab else None
