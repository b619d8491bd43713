"""Who is in the class: a CSV file as the learning management system exports it, or one made by hand.

    Canvas    the exported gradebook: Student, ID, SIS User ID, SIS Login ID, Section, ...
    Moodle    exported grades: First name, Last name, ID number, Email address, ... (or Username), or an assignment's grading
              worksheet: Identifier ("Participant 12345", the number in the names of handed-in files), Full name, Email address
    plain     the first column is the student, as in gradebook.csv; a column `name` is used if there is one

All columns are kept: the file that goes back has to have those the system knows its people by.
"""

from __future__ import annotations

import csv
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from checks.grading.tables import csv_rows

_CANVAS = ("SIS Login ID", "SIS User ID", "ID")  # what a student is called by, the first that is filled in
_MOODLE = ("Username", "ID number", "Email address", "Email")
_MOODLE_NAMES = (("First name", "Last name"), ("First name", "Surname"), ("Full name", "Identifier"))


class RosterError(ValueError):
    """A roster that cannot be used. The message names the file, the line, and what to change."""


@dataclass(frozen=True)
class Person:
    """One student. `key` is what gradebook.csv calls them; `columns` are the roster's, as they were."""

    key: str
    name: str
    columns: dict[str, str]


@dataclass(frozen=True)
class Roster:
    kind: str  # "canvas", "moodle" or "plain"
    header: tuple[str, ...]
    people: tuple[Person, ...]
    _by_word: dict[str, Person | None] = field(repr=False)

    def find(self, student: str) -> Person | None:
        """The person whom a submission's student is: by an id, by an email address, or by the name as the systems squeeze it
        into a file name ("Doe, Jane" is doejane_12345_67890). None if it is nobody, or might be two."""
        whole = word(student)
        if found := self._by_word.get(whole):
            return found
        parts = [part for part in re.split(r"[_\s]+", whole) if part]
        by_part = {person.key: person for part in parts if part.isdigit() and (person := self._by_word.get(part))}
        if len(by_part) == 1:
            return next(iter(by_part.values()))
        letters = [part for part in parts if not part.isdigit() and part not in ("late", "assignsubmission", "file")]
        return self._by_word.get(_squeezed("".join(letters)))


def read_roster(path: Path) -> Roster:
    """Raises RosterError for a file that is no roster, or names one student twice."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RosterError(f"The roster {path} cannot be read ({error}). It has to be a CSV file in UTF-8.") from None
    try:
        rows = list(csv_rows(text, _dialect(text)))
    except ValueError as error:
        raise RosterError(f"The roster {path}, {error}") from None
    if not rows:
        raise RosterError(f"The roster {path} is empty. Its first line names the columns, the first of them the student.")
    header = tuple(cell.strip() for cell in rows[0][1])
    kind = _kind_of(header)
    people: dict[str, Person] = {}
    for number, row in rows[1:]:
        columns = dict(zip(header, [cell.strip() for cell in row] + [""] * (len(header) - len(row)), strict=False))
        if kind == "canvas" and not any(columns.get(column) for column in _CANVAS):
            continue  # below its header Canvas has lines that are nobody: maxima, how grades are posted
        person = _person(kind, header, columns, path, number)
        if person.key in people:
            raise RosterError(
                f"{path}: two students are {person.key!r} (one is on line {number}). Each needs a key of its own."
            )
        people[person.key] = person
    return Roster(kind, header, tuple(people.values()), _words(people.values()))


def _dialect(text: str) -> type[csv.Dialect]:
    """Comma, semicolon or tab, whichever the first line has most of."""
    first = text.lstrip().partition("\n")[0]

    class Dialect(csv.excel):
        delimiter = max(",;\t", key=first.count)

    return Dialect


def _kind_of(header: tuple[str, ...]) -> str:
    if "Student" in header and "ID" in header:
        return "canvas"
    if any({first, last} <= set(header) for first, last in _MOODLE_NAMES):
        return "moodle"
    return "plain"


def _person(kind: str, header: tuple[str, ...], columns: dict[str, str], path: Path, number: int) -> Person:
    if kind == "canvas":
        name, keys = columns["Student"], [columns.get(column, "") for column in _CANVAS]
    elif kind == "moodle":
        first, last = next(pair for pair in _MOODLE_NAMES if set(pair) <= set(header))
        name = columns[first] if last == "Identifier" else f"{columns[first]} {columns[last]}".strip()
        keys = [columns.get(column, "") for column in (*_MOODLE, "Identifier")]
    else:
        names = {column.lower(): value for column, value in columns.items()}
        name, keys = names.get("name", ""), [columns[header[0]]]
    key = next((key for key in keys if key), "") or name
    if not key:
        raise RosterError(f"{path}, line {number}: a student without an id and without a name.")
    return Person(key, name or key, columns)


def _words(people: Iterable[Person]) -> dict[str, Person | None]:
    """What each person may be called, casefolded; None where two share it."""
    found: dict[str, Person | None] = {}
    for person in people:
        ids = [value for column, value in person.columns.items() if _identifies(column)]
        first, _, last = person.name.partition(" ")
        called = {person.key, person.name, *ids, *(i.partition("@")[0] for i in ids if "@" in i)}
        called |= {i.removeprefix("Participant ") for i in ids}
        called |= {_squeezed(person.name), _squeezed(last + first)}
        for name in {word(name) for name in called} - {""}:
            found[name] = None if name in found and found[name] != person else person
    return found


def _identifies(column: str) -> bool:
    return column in (*_CANVAS, *_MOODLE, "Identifier") or column.lower() in ("id", "email", "student_id", "login")


def word(name: str) -> str:
    """A name as names are compared: in whatever case, and however its accents are encoded (macOS takes them apart)."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name.strip()).casefold())


def _squeezed(name: str) -> str:
    """Letters alone, without accents: how a name looks in a file name."""
    plain = unicodedata.normalize("NFKD", name.casefold())
    return "".join(c for c in plain if c.isalnum())
