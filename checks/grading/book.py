"""The class as one table: the records of a grading run, the roster and the instructor's overrides put together.

A pure function of files: the same folder of records gives the same book, however often, on however many cores it was made.

    overrides.csv     student,item,points,reason      * is everybody who tried; an item is "4.2" or "4.q1"; points may be `max`
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checks.grading.records import GRADER_ERROR, ExerciseResult, PassedOver, QuizResult, Submission
from checks.grading.roster import Person, Roster, read_roster, word
from checks.grading.tables import csv_rows, harmless

RUN = "run.json"  # what the run graded: {"labs": {"04": {"4.1": 2.0, ...}}, "passed_over": [...]}
OVERRIDES = ("student", "item", "points", "reason")
Result = ExerciseResult | QuizResult


class OverrideError(ValueError):
    """A line of the overrides file that cannot be meant. The message names the line and what to change."""


@dataclass(frozen=True)
class Column:
    """One exercise or question, and the most it counts."""

    item: str
    lab: str
    max_points: float

    @property
    def is_quiz(self) -> bool:
        return "q" in self.item


@dataclass(frozen=True)
class Override:
    student: str
    item: str
    points: float | None  # None: the maximum
    reason: str
    line: int


@dataclass(frozen=True)
class Student:
    """One row. `handed_in` is everything, `submissions` by lab what counts of it; `person` is None for someone who is not in
    the roster, or where there is none."""

    key: str
    name: str
    person: Person | None
    handed_in: tuple[Submission, ...]
    submissions: Mapping[str, Submission]
    results: Mapping[str, Result]
    overrides: Mapping[str, Override]

    def points(self, column: Column) -> float:
        """What counts: an override, else what was graded, else nothing."""
        override = self.overrides.get(column.item)
        if override is not None:
            return column.max_points if override.points is None else override.points
        result = self.results.get(column.item)
        return result.points if result else 0.0


@dataclass(frozen=True)
class Book:
    columns: tuple[Column, ...]
    students: tuple[Student, ...]
    roster: Roster | None
    passed_over: tuple[PassedOver, ...] = ()  # notebooks of labs that were not asked for

    @property
    def labs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(column.lab for column in self.columns))

    def columns_of(self, lab: str) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if column.lab == lab)

    def max_of(self, lab: str | None = None) -> float:
        return total(column.max_points for column in self.columns if lab in (None, column.lab))

    def points_of(self, student: Student, lab: str | None = None) -> float:
        return total(student.points(column) for column in self.columns if lab in (None, column.lab))


def total(points: Iterable[float]) -> float:
    """A sum that does not depend on the order: 0.1 ten times is 1."""
    return math.fsum(points)


def read_book(state_dir: Path, roster: Path | None = None, overrides: Path | None = None) -> Book:
    """Raises ValueError naming the file, for a record, a roster or an override that cannot be meant."""
    people = read_roster(roster) if roster else None
    submissions = read_submissions(state_dir)
    labs, passed_over = _run_of(state_dir)
    columns = _columns(submissions, labs)
    students = _students(submissions, people)
    if overrides:
        students = _overridden(students, columns, read_overrides(overrides), overrides, people)
    return Book(columns, students, people, passed_over)


def read_submissions(state_dir: Path) -> list[Submission]:
    """Every record, in an order that does not depend on when it was made."""
    found = []
    for path in sorted(state_dir.rglob("*.json")):
        if path.name == RUN:
            continue
        try:
            found.append(Submission.from_json(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path}: {error}. Delete it, and grade again: only that one is done anew.") from None
    return sorted(found, key=lambda s: (s.student, s.lab, s.file))


def _run_of(state_dir: Path) -> tuple[dict[str, dict[str, float]], tuple[PassedOver, ...]]:
    """What the run graded, by lab and item, and what it passed over."""
    path = state_dir / RUN
    found: Any = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    found = found if isinstance(found, dict) else {}
    labs = {lab: items for lab, items in found.get("labs", {}).items() if isinstance(items, dict)}
    worth = {str(lab): {str(i): float(p) for i, p in items.items()} for lab, items in labs.items()}
    return worth, tuple(PassedOver(**other) for other in found.get("passed_over", []))


def _columns(submissions: list[Submission], worth: dict[str, dict[str, float]]) -> tuple[Column, ...]:
    """What was graded; where the run does not say, what any submission was graded for. Each lab's maximum is one number, the
    same for everybody."""
    found: dict[str, Column] = {}
    for lab, items in worth.items():
        found |= {item: Column(item, lab, points) for item, points in items.items()}
    for submission in submissions:
        if submission.lab and submission.lab not in worth:
            for result in results_of(submission):
                item, before = _item(result), found.get(_item(result))
                most = max(result.max_points, before.max_points if before else 0.0)
                found[item] = Column(item, submission.lab, most)
    return tuple(sorted(found.values(), key=lambda column: (column.lab, natural(column.item))))


def results_of(submission: Submission) -> list[Result]:
    """Exercises, then questions."""
    return [*submission.exercises, *submission.quizzes]


def _item(result: Result) -> str:
    return result.exercise if isinstance(result, ExerciseResult) else result.question


def natural(item: str) -> tuple[Any, ...]:
    """4.2 before 4.10, and exercises before questions."""
    number, _, rest = item.partition(".")
    digits = re.sub(r"\D", "", rest) or "0"
    return int(number) if number.isdigit() else 0, "q" in rest, int(digits), item


def _students(submissions: list[Submission], roster: Roster | None) -> tuple[Student, ...]:
    """In the roster's order, then who is not in it by name."""
    theirs: dict[str, list[Submission]] = defaultdict(list)
    people = {person.key: person for person in roster.people} if roster else {}
    for submission in submissions:
        person = (people.get(submission.student) or roster.find(submission.student)) if roster else None
        theirs[person.key if person else submission.student].append(submission)
    keys = [*people, *sorted(key for key in theirs if key not in people)]
    return tuple(_student(key, people.get(key), theirs.get(key, [])) for key in keys)


def _student(key: str, person: Person | None, submissions: list[Submission]) -> Student:
    """Of two notebooks of one lab (under two spellings of a name), the better one counts."""
    best: dict[str, Submission] = {}
    for submission in sorted((s for s in submissions if s.lab), key=_earned, reverse=True):
        best.setdefault(submission.lab, submission)
    results = {_item(r): r for s in best.values() for r in results_of(s)}
    name = person.name if person else key
    return Student(key, name, person, tuple(submissions), dict(sorted(best.items())), results, {})


def _earned(submission: Submission) -> float:
    return total(result.points for result in results_of(submission))


# --------------------------------------------------------------------------------------------------------------- overrides


def read_overrides(path: Path) -> list[Override]:
    """Raises OverrideError naming the line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise OverrideError(f"The overrides {path} cannot be read ({error}).") from None
    try:
        (first, header), *rows = list(csv_rows(text)) or [(1, [])]
    except ValueError as error:
        raise OverrideError(f"{path}, {error}") from None
    names = [name.strip() for name in header]
    if missing := [name for name in OVERRIDES if name not in names]:
        told = f"no {', '.join(missing)}. The file begins with the names of its columns, {','.join(OVERRIDES)}."
        raise OverrideError(f"{path}, line {first}: {told}")
    found = []
    for number, cells in rows:
        if any(cell.strip() for cell in cells[len(names) :]):
            told = f"{len(cells)} columns, and not {len(names)}. A reason with a comma is written in quotation marks."
            raise OverrideError(f"{path}, line {number}: {told}")
        row = dict(zip(names, cells, strict=False))
        if missing := [name for name in OVERRIDES if row.get(name) is None]:
            raise OverrideError(f"{path}, line {number}: no {', '.join(missing)}. The columns are {','.join(OVERRIDES)}.")
        points = row["points"].strip().lower()
        try:
            value = None if points == "max" else float(points)
        except ValueError:
            raise OverrideError(f"{path}, line {number}: points are a number or `max`, not {row['points']!r}.") from None
        if value is not None and not 0 <= value < math.inf:
            raise OverrideError(f"{path}, line {number}: points are 0 or more, not {row['points']!r}.")
        if not row["reason"].strip():
            raise OverrideError(f"{path}, line {number}: no reason. The student will read it; say why.")
        found.append(Override(row["student"].strip(), row["item"].strip(), value, row["reason"].strip(), number))
    return found


def _overridden(
    students: tuple[Student, ...], columns: tuple[Column, ...], overrides: list[Override], path: Path, roster: Roster | None
) -> tuple[Student, ...]:
    """A line for one student counts before a line for all; of two of a kind, the later. A line for all is for those who tried:
    who handed nothing in, or left the stub as it was, gets nothing by it."""
    most, called = {column.item: column.max_points for column in columns}, _names_of(students)
    tried = {column.item: {s.key for s in students if _tried(s, column)} for column in columns}
    given: dict[str, dict[str, Override]] = {student.key: {} for student in students}
    for override in sorted(overrides, key=lambda override: override.student != "*"):
        number = override.line
        if override.item not in most:
            raise OverrideError(f"{path}, line {number}: there is no {override.item!r}. Graded were: {', '.join(most)}.")
        if override.points is not None and override.points > most[override.item]:
            raise OverrideError(f"{path}, line {number}: {override.item} counts at most {most[override.item]:g} points.")
        if override.student == "*":
            meant = tried[override.item]
        else:
            meant = _meant(override.student, called, roster)
            if len(meant) != 1:
                raise OverrideError(f"{path}, line {number}: {_nobody(override.student, meant, students)}")
        for key in meant:
            given[key][override.item] = override
    return tuple(replace(student, overrides=given[student.key]) for student in students)


def _names_of(students: Iterable[Student]) -> dict[str, set[str]]:
    """The keys of the students by all they may be called in an overrides file: as gradebook.csv shows them, by name, and as
    their files call them."""
    called: dict[str, set[str]] = defaultdict(set)
    for student in students:
        for name in (student.key, harmless(student.key), student.name, *(s.student for s in student.handed_in)):
            called[word(name)].add(student.key)
    return called


def _meant(name: str, called: Mapping[str, set[str]], roster: Roster | None) -> set[str]:
    """Whom a line is for: the student with this key; else who is called so, in whatever case; else whom the roster would take a
    file of that name for. None, or several, where it cannot be said."""
    if any(name in keys for keys in called.values()):
        return {name}
    found = called.get(word(name), set())
    person = roster.find(name) if roster and not found else None
    return {person.key} if person else found


def _nobody(name: str, meant: set[str], students: Iterable[Student]) -> str:
    """Why a line of the overrides is for nobody, and who there is."""
    if meant:
        return f"{name!r} may be {' or '.join(sorted(meant))}. Write the one of gradebook.csv's first column."
    known = [student.key for student in students]
    close = difflib.get_close_matches(name, known, _SHOWN, 0.5)
    shown = close or known[:_SHOWN]
    more = f", and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
    return (
        f"there is no student {name!r}. A student is named as in gradebook.csv's first column, by name, or as the files that"
        f" were handed in are called. There {'are' if len(known) != 1 else 'is'}: {', '.join(shown) or 'nobody'}{more}."
    )


_SHOWN = 8  # names in a message


def _tried(student: Student, column: Column) -> bool:
    """Not who left the stub; nor whose notebook grading itself stopped at: a new run has to tell whether they tried."""
    result = student.results.get(column.item)
    if result is None or result.status in ("not_attempted", "missing", "not_answered"):
        return False
    return result.status != "error" or all(i.kind != GRADER_ERROR for i in student.submissions[column.lab].incidents)
