"""Everything that is handed on, computed from the folder of records: the same records give the same files, to the byte."""

from __future__ import annotations

from pathlib import Path

from checks.grading.book import read_book
from checks.grading.class_report import class_report
from checks.grading.feedback import feedback, file_name
from checks.grading.gradebook import gradebook
from checks.grading.incidents import incidents
from checks.grading.junit import junit
from checks.grading.lms import canvas, moodle
from checks.grading.tables import write_csv
from checks.student.home import write_atomically

FEEDBACK = "feedback"


def write_all(state_dir: Path, out: Path, roster: Path | None = None, overrides: Path | None = None) -> None:
    """Write all outputs into `out`. Feedback of students who are no longer there is removed. Raises ValueError naming the file
    and line, before anything is written, for a record, a roster or an override that cannot be meant."""
    book = read_book(state_dir, roster, overrides)
    pages = {file_name(student): feedback(book, student) for student in book.students if student.handed_in or student.overrides}
    for name, rows in (
        ("gradebook.csv", gradebook(book)),
        ("canvas.csv", canvas(book)),
        ("moodle.csv", moodle(book)),
        ("incidents.csv", incidents(book)),
    ):
        write_csv(out / name, rows)
    write_atomically(out / "junit.xml", junit(book))
    write_atomically(out / "report.html", class_report(book))
    for name, content in pages.items():
        write_atomically(out / FEEDBACK / name, content)
    for old in sorted((out / FEEDBACK).glob("*.html")):
        if old.name not in pages:
            old.unlink()
