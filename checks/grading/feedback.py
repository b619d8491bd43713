"""feedback/NAME.html: what one student is told. One self-contained page, with every lab that was handed in.

It shows points, statuses, the messages of the public cases (those that the notebook itself shows), the instructor's reasons,
and fixed sentences. No hidden case, no output of any kind from the hidden tests, no incident's detail.
"""

from __future__ import annotations

import hashlib
import re

from checks.exercises import table as exercises
from checks.grading.book import Book, Column, Result, Student
from checks.grading.pages import block, name, page, table, text
from checks.grading.records import ExerciseResult, QuizResult, Submission
from checks.grading.tables import number
from checks.grading.words import EXPLAINED, INCIDENTS, OTHER_INCIDENT, STATUS, UNKNOWN_STATUS, cell_words, hidden_words

_RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))}  # on Windows


def file_name(student: Student) -> str:
    """A name that every file system takes, that two students never share, and that leads nowhere else."""
    plain = re.sub(r"[^A-Za-z0-9.-]+", "_", student.key).strip("._")[:60]
    if plain and plain == student.key == plain.lower() and plain.partition(".")[0] not in _RESERVED:
        return f"{plain}.html"
    return f"{plain or 'student'}-{hashlib.sha256(student.key.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}.html"


def feedback(book: Book, student: Student) -> str:
    """The page, as text."""
    earned, most = book.points_of(student), book.max_of()
    parts = [
        f"<h1>Feedback for {name(student.name)}</h1>",
        f"<p><strong>{number(earned)} of {number(most)} points</strong> in {_labs(book)}.</p>",
        *(_lab(book, student, lab) for lab in book.labs),
        *(_loose(s) for s in student.handed_in if not s.lab),
        '<p class="soft">A message says what the public cases found, the same that the notebook shows. Hidden tests are the'
        " same check with other and larger inputs; of them only the kind of failure is told.</p>",
    ]
    return page(f"Feedback for {student.name}", "\n".join(parts))


def _labs(book: Book) -> str:
    return f"Lab{'s' if len(book.labs) > 1 else ''} {text(', '.join(book.labs))}" if book.labs else "no lab"


def _lab(book: Book, student: Student, lab: str) -> str:
    columns, submission = book.columns_of(lab), student.submissions.get(lab)
    heading = f"<h2>Lab {text(lab)}: {number(book.points_of(student, lab))} of {number(book.max_of(lab))} points</h2>"
    if submission is None:
        return heading + _rows(student, [c for c in columns if c.item in student.overrides]) + "<p>Nothing was handed in.</p>"
    return "\n".join([heading, _file(submission), _rows(student, columns), _cells(submission), _remarks(student, lab)])


def _file(submission: Submission) -> str:
    version = f", version {text(submission.lab_version)} of the lab" if submission.lab_version else ""
    return f"<p>Graded: <bdi><code>{text(submission.file)}</code></bdi>{version}.</p>"


def _rows(student: Student, columns: list[Column] | tuple[Column, ...]) -> str:
    rows = [[_item(c), _status(student, c), _points(student, c)] for c in columns]
    told = [_told(student, c) for c in columns]
    return table("Exercises and questions", ["Item", "Result", "Points"], rows, frozenset({2}), told) if rows else ""


def _item(column: Column) -> str:
    """ "4.1", and what the exercise asks for."""
    row = exercises().get(column.item)
    return text(column.item) + (f' <span class="asks">{text(row.asks)}</span>' if row else "")


def _status(student: Student, column: Column) -> str:
    if column.item in student.overrides:
        return '<span class="set">✎ set by your instructor</span>'
    result = student.results.get(column.item)
    kind, word = _word(column, result)
    return f'<span class="{kind}">{word}</span>'


def _word(column: Column, result: Result | None) -> tuple[str, str]:
    if result is None:
        return STATUS["not_answered" if column.is_quiz else "missing"]
    return STATUS.get(result.status, UNKNOWN_STATUS)


def _points(student: Student, column: Column) -> str:
    return f"{number(student.points(column))} of {number(column.max_points)}"


def _told(student: Student, column: Column) -> str:
    result, override = student.results.get(column.item), student.overrides.get(column.item)
    parts = []
    if override:
        parts.append(f"<p><strong>{_points(student, column)} points</strong>, because: {text(override.reason)}</p>")
    if result is None:
        return "".join(parts)
    if override and not isinstance(result, QuizResult):
        parts.append(f"<p>What the check had said: {_word(column, result)[1].partition(' ')[2]}.</p>")
    if result.message.strip() and result.status not in ("passed", "not_attempted", "right", "error"):
        parts.append(block(result.message))
    elif result.status in EXPLAINED:
        parts.append(f"<p>{EXPLAINED[result.status]}</p>")
    if isinstance(result, ExerciseResult) and (words := hidden_words(result.hidden)):
        parts.append(f"<p>{text(words[:1].upper() + words[1:])}.</p>")
    return "".join(parts)


def _cells(submission: Submission) -> str:
    """How the notebook went as a whole, with the official cells around the student's."""
    cells = [cell for cell in submission.nbval if cell.status != "skipped"]
    if not cells:
        return ""
    stopped = [f"<li><code>{text(c.cell)}</code>: {cell_words(c.category)}</li>" for c in cells if c.status != "passed"]
    told = f"Run from top to bottom, {len(cells) - len(stopped)} of its {len(cells)} code cells worked. This counts nothing."
    return f"<h3>The notebook as a whole</h3><p>{told}</p>" + (f"<ul>{''.join(stopped)}</ul>" if stopped else "")


def _remarks(student: Student, lab: str) -> str:
    """What is to be known of the files of a lab, a sentence for each kind of incident."""
    submissions = [s for s in student.handed_in if s.lab == lab]
    kinds = list(dict.fromkeys(incident.kind for s in submissions for incident in s.incidents))
    if len(submissions) > 1:
        kinds.append("duplicate_submission")
    sentences = list(dict.fromkeys(INCIDENTS.get(kind, OTHER_INCIDENT) for kind in kinds))
    return "<h3>About the file</h3><ul>" + "".join(f"<li>{s}</li>" for s in sentences) + "</ul>" if sentences else ""


def _loose(submission: Submission) -> str:
    sentences = dict.fromkeys(INCIDENTS.get(i.kind, OTHER_INCIDENT) for i in submission.incidents)
    told = " ".join(sentences) or INCIDENTS["unknown_lab"]
    return f"<h2>Another file</h2><p><bdi><code>{text(submission.file)}</code></bdi>: {told}</p>"
