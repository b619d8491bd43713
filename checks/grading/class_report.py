"""report.html: the class, for its instructor. How the points are spread, which exercise was hardest, and what went wrong most
often, in the checks' own words. It names no student and quotes none, so it can be shown in class; incidents.csv names them.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict

from checks.grading.book import Book, Column, Student
from checks.grading.charts import Split, bins_of, histogram, stacked
from checks.grading.pages import block, page, table, text
from checks.grading.records import OPEN, ExerciseResult
from checks.grading.tables import number
from checks.grading.words import INCIDENTS, KINDS, STATUS, UNKNOWN_STATUS, for_the_class, hidden_words

COMMONEST = 12


def class_report(book: Book) -> str:
    """The page, as text."""
    parts = ["<h1>Class report</h1>", _summary(book), *_warnings(book)]
    if book.columns:
        everybody = _handed_in(book)
        totals = [book.points_of(s) for s in everybody]
        if len(book.labs) > 1:
            parts += ["<h2>All labs</h2>", histogram("all", "Points of all labs together", bins_of(totals, book.max_of()))]
        parts += [_lab(book, lab) for lab in book.labs]
        parts += [_hardest(book), _commonest(book)]
    parts += [_incidents(book)]
    return page("Class report", "\n".join(parts))


def _handed_in(book: Book, lab: str | None = None) -> list[Student]:
    """Who handed in something that was graded."""
    return [s for s in book.students if (lab in s.submissions if lab else s.submissions)]


def _summary(book: Book) -> str:
    there, all_of_them = len(_handed_in(book)), len(book.students)
    files = sum(len(s.handed_in) for s in book.students)
    return (
        f"<p>{there} of {all_of_them} student{'s' * (all_of_them != 1)} handed in a lab that was graded;"
        f" {files} file{'s' * (files != 1)} in all. The maximum is {number(book.max_of())} points.</p>"
    )


def _warnings(book: Book) -> list[str]:
    """What must not be overlooked: answers that were not graded, and grading without isolation."""
    submissions = [s for student in book.students for s in student.submissions.values()]
    errors = sum(result.status == "error" for s in submissions for result in s.exercises)
    bare = sum(s.isolation == "not isolated" for s in submissions)
    found = []
    if errors:
        found.append(
            f'<p class="bad">{errors} answer{"s" * (errors != 1)} could not be graded and count{"s" * (errors == 1)} 0 for now:'
            " grade these exercises again (incidents.csv has them as “not graded”).</p>"
        )
    if bare:
        found.append(
            f'<p class="open">{bare} of {len(submissions)} were graded <strong>not isolated</strong>: students’ code ran'
            " as you, with limits on time and memory only. INSTRUCTORS.md says what that means.</p>"
        )
    return found


def _lab(book: Book, lab: str) -> str:
    """A lab's spread of points, and how its exercises went."""
    students = _handed_in(book, lab)
    points, most = [book.points_of(s, lab) for s in students], book.max_of(lab)
    if not points:
        return f"<h2>Lab {text(lab)}</h2><p>Nobody handed it in.</p>"
    middle, mean = statistics.median(points), statistics.fmean(points)
    told = f"{len(points)} handed in; median {number(middle)}, mean {number(round(mean, 2))}, of {number(most)} points."
    key = f"lab{re.sub(r'[^0-9A-Za-z]', '', lab)}"
    splits = [_split(column, students) for column in book.columns_of(lab)]
    return "\n".join(
        [
            f"<h2>Lab {text(lab)}</h2><p>{told}</p>",
            histogram(f"{key}h", f"Lab {lab}: points of those who handed it in", bins_of(points, most)),
            stacked(f"{key}s", f"Lab {lab}: how each exercise and question went", splits),
        ]
    )


def _split(column: Column, students: list[Student]) -> Split:
    kinds = Counter(_kind(student, column) for student in students)
    return Split(column.item, kinds["right"], kinds["wrong"], kinds["open"])


def _kind(student: Student, column: Column) -> str:
    result = student.results.get(column.item)
    if result is None or result.status in OPEN:
        return "open"
    return "right" if result.status in ("passed", "right", "answered") else "wrong"


def _hardest(book: Book) -> str:
    """Exercises by the share of those who tried and got them right, the least first."""
    rows = []
    for column in book.columns:
        split = _split(column, _handed_in(book, column.lab))
        tried = split.right + split.wrong
        if tried and not column.is_quiz:
            rows.append((split.right / tried, column.item, split.right, tried, split.open))
    cells = [[text(i), f"{right} of {tried}", f"{share:.0%}", str(left)] for share, i, right, tried, left in sorted(rows)]
    if not cells:
        return ""
    head = ["Exercise", "Right, of those who tried", "Share", "Did not try"]
    return "<h2>Hardest exercises</h2>" + table("The hardest first", head, cells, frozenset({1, 2, 3}))


def _commonest(book: Book) -> str:
    """Wrong answers by what the check said of them; where that has words of a student's code in it, or one student alone was
    told it, by the kind of failure. Messages that differ in their numbers alone are one."""
    groups: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for student in book.students:
        for result in student.results.values():
            if isinstance(result, ExerciseResult) and result.status not in (*OPEN, "passed"):
                word = STATUS.get(result.status, UNKNOWN_STATUS)[1].partition(" ")[2]
                message = for_the_class(result.category, result.message).strip() or hidden_words(result.hidden) or word
                groups[result.exercise, re.sub(r"\d+", "#", message), KINDS.get(result.category, "")][message] += 1
    for (exercise, said_once, kind), said in list(groups.items()):
        if kind and said.total() == 1:
            del groups[exercise, said_once, kind]
            groups[exercise, kind, ""][kind] += 1
    most = sorted(groups.items(), key=lambda group: (-group[1].total(), group[0]))[:COMMONEST]
    rows = []
    for (exercise, _, _), said in most:
        shown = min(said, key=lambda m: (-said[m], m))
        rows.append([text(exercise), str(said.total()), block(shown, 600)])
    if not rows:
        return ""
    return "<h2>Commonest wrong answers</h2>" + table(
        "By the check's message where several students got it, without what their code said; of those that differ in numbers"
        " alone, the most frequent",
        ["Exercise", "Students", "What the check said"],
        rows,
        frozenset({1}),
    )


def _incidents(book: Book) -> str:
    """How often each kind happened."""
    kinds = Counter(i.kind for student in book.students for s in student.handed_in for i in s.incidents)
    kinds.update(["another lab"] * len(book.passed_over))
    kinds.update("remark" for student in book.students for s in student.handed_in for r in s.exercises for _ in r.flags)
    if not kinds:
        return "<h2>Incidents</h2><p>None.</p>"
    explained = {
        **INCIDENTS,
        "remark": "Not told. An answer is the reference's code; only with that was it compared. It costs nothing by itself.",
        "another lab": "Not told. A notebook of a lab that this run was not asked for. It was not graded.",
    }
    rows = [[text(kind), str(n), explained.get(kind, "")] for kind, n in sorted(kinds.items(), key=lambda k: (-k[1], k[0]))]
    head = ["Kind", "How often", "What the student is told"]
    return "<h2>Incidents</h2>" + table("incidents.csv has each with its file and student", head, rows, frozenset({1}))
