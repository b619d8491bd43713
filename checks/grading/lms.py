"""Grades for a learning management system: canvas.csv and moodle.csv, in the forms that these import.

One column a lab. A student who handed nothing in gets an empty cell, which both systems leave alone, so that their own rules
for what is missing apply; gradebook.csv has zeros there.

Canvas (Grades > Import): the identifying columns of its own export, a line of maxima, and "Name (ID)" for an assignment that
exists; without the ID it asks which one is meant. Moodle (Grades > Import > CSV file): who is who and what is which column are
chosen on its page; grade and feedback are imported together, since Moodle drops the grade of a feedback that comes alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from checks.grading.book import Book, Student
from checks.grading.tables import Value, number

_CANVAS = ("Student", "ID", "SIS User ID", "SIS Login ID", "Section")
_MOODLE = (
    "Identifier", "Full name", "Username", "First name", "Last name", "Surname", "ID number", "Institution", "Department",
    "Email address", "Email",
)  # fmt: skip


def canvas(book: Book) -> Iterator[Sequence[Value]]:
    """With a Canvas export as roster its people and assignments are met by their ids. Else SIS Login ID is the student."""
    assignments = [_assignment(book, lab) for lab in book.labs]
    yield [*_CANVAS, *assignments]
    yield ["    Points Possible", None, None, None, None, *(book.max_of(lab) for lab in book.labs)]
    for student in _known(book):
        who: list[Value] = [student.name, None, None, student.key, None]
        if _is_from(book, "canvas") and student.person:
            who = [student.person.columns.get(column, "") for column in _CANVAS]
        yield [*who, *(_grade(book, student, lab) for lab in book.labs)]


def _is_from(book: Book, system: str) -> bool:
    return book.roster is not None and book.roster.kind == system


def _known(book: Book) -> list[Student]:
    """Whom grades are handed on for: with a roster, only those in it. For others there is nobody in the system, or somebody
    else (incidents.csv names them, and gradebook.csv has their points)."""
    return [student for student in book.students if student.person or book.roster is None]


def _assignment(book: Book, lab: str) -> str:
    """The header of the roster's column that begins with "Lab 04", else that name."""
    header = book.roster.header if book.roster and _is_from(book, "canvas") else ()
    return next((name for name in header if re.match(rf"lab\s*0*{int(lab)}\b", name, re.IGNORECASE)), f"Lab {lab}")


def moodle(book: Book) -> Iterator[Sequence[Value]]:
    """With a Moodle export as roster its identifying columns; else Username and Full name."""
    known = [c for c in book.roster.header if c in _MOODLE] if book.roster and _is_from(book, "moodle") else []
    yield [*(known or ["Username", "Full name"]), *(c for lab in book.labs for c in (f"Lab {lab}", f"Lab {lab} feedback"))]
    for student in _known(book):
        who: list[Value] = [student.key, student.name]
        if known and student.person:
            who = [student.person.columns.get(column, "") for column in known]
        yield [*who, *(c for lab in book.labs for c in (_grade(book, student, lab), _feedback(book, student, lab)))]


def _grade(book: Book, student: Student, lab: str) -> float | None:
    touched = lab in student.submissions or any(column.item in student.overrides for column in book.columns_of(lab))
    return book.points_of(student, lab) if touched else None


def _feedback(book: Book, student: Student, lab: str) -> str | None:
    """One line: the points of each exercise. What was wrong with them is in the feedback file."""
    if _grade(book, student, lab) is None:
        return None
    return "; ".join(f"{c.item}: {number(student.points(c))} of {number(c.max_points)}" for c in book.columns_of(lab))
