"""incidents.csv: what an instructor should look at, one line each. An incident costs no points by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from checks.grading.book import Book
from checks.grading.tables import Value

HEADER = ("student", "lab", "file", "kind", "cell or file", "detail")


def incidents(book: Book) -> Iterator[Sequence[Value]]:
    """Every incident of every submission, also of those that another of the same lab replaced; remarks on answers; who is not
    in the roster; then notebooks of labs that were not asked for."""
    yield HEADER
    for student in book.students:
        for submission in student.handed_in:
            at = (student.key, submission.lab, submission.file)
            for incident in submission.incidents:
                yield [*at, incident.kind, incident.cell_or_file, incident.detail]
            for result in submission.exercises:
                yield from ([*at, "remark", result.exercise, flag] for flag in result.flags)
                if result.status == "error":
                    yield [*at, "not graded", result.exercise, "The grader failed on it; grade this exercise again."]
        if book.roster and student.person is None:
            yield [student.key, "", "", "not in the roster", "", "In gradebook.csv; not in canvas.csv and moodle.csv."]
    for other in book.passed_over:
        person = book.roster.find(other.student) if book.roster else None
        told = f"Lab {other.lab} was not asked for; the notebook was not graded."
        yield [person.key if person else other.student, other.lab, other.file, "another lab", "", told]
