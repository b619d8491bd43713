"""junit.xml: the same results in the form that CI systems and test viewers read. One suite a notebook, one case an exercise;
where notebooks were run as a whole, a second suite with the cells."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from checks.grading.book import Book, Column, Override, Student
from checks.grading.records import OPEN, ExerciseResult, Submission
from checks.grading.tables import number, visible
from checks.grading.words import STATUS, UNKNOWN_STATUS, cell_words, hidden_words


def junit(book: Book) -> str:
    """Not attempted is `skipped`, the grader's own failure is `error`. Times are left out: the file is the same for the same
    records."""
    root = ET.Element("testsuites", name="minivllm")
    for student in book.students:
        for lab, submission in student.submissions.items():
            root.append(_suite(book, student, lab, submission))
            if submission.nbval:
                root.append(_cells(student, lab, submission))
    for key in ("tests", "failures", "errors", "skipped"):
        root.set(key, str(sum(int(suite.get(key, "0")) for suite in root)))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _suite(book: Book, student: Student, lab: str, submission: Submission) -> ET.Element:
    suite = ET.Element("testsuite", name=visible(f"{student.key} / Lab {lab}"), package=f"lab_{lab}")
    properties = ET.SubElement(suite, "properties")
    for key, value in (
        ("file", submission.file), ("version", submission.lab_version), ("isolation", submission.isolation),
        ("points", number(book.points_of(student, lab))), ("max", number(book.max_of(lab))),
    ):  # fmt: skip
        ET.SubElement(properties, "property", name=key, value=visible(value))
    kinds = [_case(suite, student, column) for column in book.columns_of(lab)]
    suite.set("tests", str(len(kinds)))
    for key, kind in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(key, str(kinds.count(kind)))
    return suite


def _cells(student: Student, lab: str, submission: Submission) -> ET.Element:
    """The cells of the rebuilt notebook, as nbval ran them. They count nothing."""
    suite = ET.Element("testsuite", name=visible(f"{student.key} / Lab {lab} / cells"), package=f"lab_{lab}_cells")
    for cell in submission.nbval:
        case = ET.SubElement(suite, "testcase", classname=visible(f"{student.key}.lab_{lab}.cells"), name=visible(cell.cell))
        if cell.status != "passed":
            ET.SubElement(case, "failure" if cell.status == "failed" else "skipped", message=cell_words(cell.category))
    kinds = [cell.status for cell in submission.nbval]
    failed, passed = kinds.count("failed"), kinds.count("passed")
    counts = {"tests": len(kinds), "failures": failed, "errors": 0, "skipped": len(kinds) - failed - passed}
    for key, count in counts.items():
        suite.set(key, str(count))
    return suite


def _case(suite: ET.Element, student: Student, column: Column) -> str:
    """Add a test case; says what became of it: "passed", "failure", "error" or "skipped"."""
    case = ET.SubElement(suite, "testcase", classname=visible(f"{student.key}.lab_{column.lab}"), name=column.item)
    result = student.results.get(column.item)
    if override := student.overrides.get(column.item):
        return _overridden(case, student, column, override)
    status = result.status if result else ("not_answered" if column.is_quiz else "missing")
    word = STATUS.get(status, UNKNOWN_STATUS)[1].partition(" ")[2]
    if status in ("passed", "right", "answered"):
        return "passed"
    kind = "error" if status == "error" else "skipped" if status in OPEN else "failure"
    told = ET.SubElement(case, kind, message=word)
    if kind != "skipped" and result is not None:
        told.set("type", status)
        hidden = hidden_words(result.hidden) if isinstance(result, ExerciseResult) else ""
        told.text = visible("\n".join(part for part in (result.message, hidden) if part), keep="\n")[:4000] or None
    return kind


def _overridden(case: ET.Element, student: Student, column: Column, override: Override) -> str:
    """The instructor's word in place of the check's: passed with all points."""
    told = f"set by the instructor, {number(student.points(column))} of {number(column.max_points)} points: {override.reason}"
    if student.points(column) >= column.max_points:
        ET.SubElement(case, "system-out").text = visible(told)
        return "passed"
    ET.SubElement(case, "failure", message=visible(told))
    return "failure"
