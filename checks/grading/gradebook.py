"""gradebook.csv, one row a student: the student, one column an exercise and question, then `total` and the fixed `max`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from checks.grading.book import Book
from checks.grading.tables import Value


def gradebook(book: Book) -> Iterator[Sequence[Value]]:
    """Who is in the roster and handed nothing in has zeros; the maximum is the same in every row."""
    yield ["student", *(column.item for column in book.columns), "total", "max"]
    for student in book.students:
        yield [student.key, *map(student.points, book.columns), book.points_of(student), book.max_of()]
