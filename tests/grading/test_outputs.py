"""The files that grading hands on: pure functions of the records, and safe whatever a student is called or wrote."""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.grading.book import OverrideError, read_book
from checks.grading.charts import Split, bins_of, histogram, stacked
from checks.grading.feedback import feedback, file_name
from checks.grading.outputs import write_all
from checks.grading.pages import block, text
from checks.grading.records import CellResult, ExerciseResult, Incident, QuizResult, Submission
from checks.grading.roster import RosterError, read_roster
from checks.grading.tables import csv_text, harmless, number
from checks.grading.words import INCIDENTS, hidden_words

FIRST = ExerciseResult("4.1", 2, 2, "passed")
SECOND = ExerciseResult("4.2", 0, 2, "failed", "block 7 is in two tables (requests A and C)", "hidden tests: wrong value")
QUESTION = QuizResult("4.q1", 0.5, 0.5, "answered")


def submission(student: str = "ada", lab: str = "04", **more: object) -> Submission:
    told = {"lab_version": "1", "file": f"{lab}_paged_kv.ipynb", "exercises": (FIRST, SECOND), "quizzes": (QUESTION,), **more}
    return Submission(student, lab, **told)  # type: ignore[arg-type]


class Class:
    """A run's folder of records, and what is written from it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state, self.out = folder, folder / ".state", folder / "out"
        self.state.mkdir()
        self._roster: Path | None = None
        self._overrides: Path | None = None

    def add(self, *submissions: Submission) -> None:
        for one in submissions:
            (self.state / f"{len(list(self.state.iterdir()))}.json").write_text(one.to_json(), encoding="utf-8")

    def roster(self, text: str) -> None:
        self._roster = self.folder / "roster.csv"
        self._roster.write_text(text, encoding="utf-8")

    def overrides(self, *lines: str) -> None:
        self._overrides = self.folder / "overrides.csv"
        self._overrides.write_text("\n".join(["student,item,points,reason", *lines]) + "\n", encoding="utf-8")

    def write(self) -> None:
        write_all(self.state, self.out, self._roster, self._overrides)

    def rows(self, name: str) -> list[list[str]]:
        self.write()
        return list(csv.reader(io.StringIO((self.out / name).read_text(encoding="utf-8"))))

    def page(self, student: str = "ada") -> str:
        book = read_book(self.state, self._roster, self._overrides)
        return feedback(book, next(s for s in book.students if s.key == student))


@pytest.fixture
def course(tmp_path: Path) -> Class:
    return Class(tmp_path)


# ---------------------------------------------------------------------------------------------------------- gradebook


def test_the_gradebook_has_student_items_total_and_the_fixed_max(course: Class) -> None:
    course.add(submission("bob", exercises=(FIRST,)), submission("ada"))
    assert course.rows("gradebook.csv") == [
        ["student", "4.1", "4.2", "4.q1", "total", "max"],
        ["ada", "2", "0", "0.5", "2.5", "4.5"],
        ["bob", "2", "0", "0.5", "2.5", "4.5"],
    ]


def test_labs_that_nobody_handed_in_have_their_columns(course: Class) -> None:
    worth = {"04": {"4.1": 2, "4.2": 2, "4.q1": 0.5}, "05": {"5.1": 1, "5.10": 1, "5.2": 1}}
    (course.state / "run.json").write_text(json.dumps({"labs": worth}))
    course.add(submission())
    header, ada = course.rows("gradebook.csv")
    assert header[4:] == ["5.1", "5.2", "5.10", "total", "max"] and ada[4:] == ["0", "0", "0", "2.5", "7.5"]


def test_who_handed_nothing_in_is_there_with_zeros_in_the_rosters_order(course: Class) -> None:
    course.add(submission("ada"), submission("stranger"))
    course.roster("student,name\nzoe,Zoë\nada,Ada\n")
    assert [row[0] for row in course.rows("gradebook.csv")[1:]] == ["zoe", "ada", "stranger"]
    assert course.rows("gradebook.csv")[1][1:] == ["0", "0", "0", "0", "4.5"]
    told = "In gradebook.csv; not in canvas.csv and moodle.csv."
    assert ["stranger", "", "", "not in the roster", "", told] in course.rows("incidents.csv")


@pytest.mark.parametrize("kind", ["student,name\nada,Ada\n", "First name,Last name,ID number\nAda,Lovelace,ada\n", ""])
def test_who_is_not_in_the_roster_is_in_no_file_for_a_learning_system(course: Class, kind: str) -> None:
    course.add(submission("ada"), submission("stranger"))
    if kind:
        course.roster(kind)
    for name in ("canvas.csv", "moodle.csv"):
        assert any("stranger" in row for row in course.rows(name)) == (not kind)
    assert "stranger" in [row[0] for row in course.rows("gradebook.csv")]


def test_a_notebook_of_a_lab_that_was_not_asked_for_is_a_row_of_its_own(course: Class) -> None:
    other = {"student": "S-bob", "lab": "05", "file": "bob/05.ipynb"}
    (course.state / "run.json").write_text(json.dumps({"labs": {}, "passed_over": [other]}))
    course.add(submission("ada"))
    told = "Lab 05 was not asked for; the notebook was not graded."
    assert ["S-bob", "05", "bob/05.ipynb", "another lab", "", told] in course.rows("incidents.csv")
    assert "another lab</th>" in (course.out / "report.html").read_text(encoding="utf-8")
    assert [row[0] for row in course.rows("gradebook.csv")[1:]] == ["ada"]
    course.roster("student,id\nada,1\nbob,S-bob\n")
    assert ["bob", "05", "bob/05.ipynb", "another lab", "", told] in course.rows("incidents.csv")


def test_of_two_notebooks_of_a_lab_the_better_one_counts_and_both_are_told(course: Class) -> None:
    course.add(submission(file="first.ipynb"), submission(file="second.ipynb", exercises=(), quizzes=()))
    assert course.rows("gradebook.csv")[1] == ["ada", "2", "0", "0.5", "2.5", "4.5"]
    assert "first.ipynb" in course.page() and INCIDENTS["duplicate_submission"] in course.page()


def test_the_same_records_give_the_same_bytes_in_whatever_order_they_came(tmp_path: Path) -> None:
    several = [submission(name, lab) for name in ("ada", "bob", "cem") for lab in ("04", "05")]
    made = []
    for folder, records in (("a", several), ("b", several[::-1])):
        (tmp_path / folder).mkdir()
        course = Class(tmp_path / folder)
        course.add(*records)
        course.write()
        course.write()
        made.append({p.relative_to(course.out): p.read_bytes() for p in course.out.rglob("*") if p.is_file()})
    assert made[0] == made[1]


def test_a_record_that_cannot_be_read_is_named_and_nothing_is_written(course: Class) -> None:
    (course.state / "x.json").write_text("{")
    with pytest.raises(ValueError, match=r"x\.json"):
        course.write()
    assert not course.out.exists()


def test_feedback_of_who_is_gone_is_removed(course: Class) -> None:
    course.add(submission("ada"), submission("bob"))
    course.write()
    (course.state / "1.json").unlink()
    course.write()
    assert [p.name for p in (course.out / "feedback").iterdir()] == ["ada.html"]


# -------------------------------------------------------------------------------------------------------------- safety


@pytest.mark.parametrize("start", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", " =1", "＝1", "\n@x"])
def test_no_cell_is_a_formula(start: str) -> None:
    (row,) = csv.reader(io.StringIO(csv_text([[start, f"a;{start}", 1.5]])))
    assert row[0].startswith("'") and row[2] == "1.5"


@given(st.text())
def test_any_text_is_one_cell_of_one_line(value: str) -> None:
    (row,) = csv.reader(io.StringIO(csv_text([["x", value, "y"]])))
    assert row[0] == "x" and row[1] == harmless(value) and row[2] == "y"
    assert not harmless(value).lstrip().startswith(("=", "+", "-", "@"))


@given(st.text())
def test_any_text_is_text_in_a_page(value: str) -> None:
    seen: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            seen.append(tag)

    for markup in (text(value), block(value)):
        Reader().feed(markup)
    assert seen == ["pre"]
    ET.fromstring(f"<a b={text(value)!r}/>" if "'" not in text(value) else f'<a b="{text(value)}"/>')


def test_numbers_are_short_and_never_scientific() -> None:
    assert [number(n) for n in (2.0, 0.5, 11.25, 0.0, 1e-9, 100)] == ["2", "0.5", "11.25", "0", "0", "100"]


NASTY = "</pre><script>alert(1)</script>\x1b[31m\x00\u202e"


def test_nothing_a_student_says_is_markup_anywhere(course: Class) -> None:
    failed = ExerciseResult("4.1", 0, 2, "failed", NASTY, "hidden tests: " + NASTY)
    course.add(submission(NASTY, file=NASTY, exercises=(failed,), incidents=(Incident("tampering", NASTY, NASTY),)))
    course.write()
    for path in [course.out / "report.html", *(course.out / "feedback").iterdir()]:
        page = path.read_text(encoding="utf-8")
        assert "<script" not in page and not set(page) & set("\x1b\x00\u202e")
        assert "default-src 'none'" in page and not re.search(r"""(src|href)\s*=\s*["']""", page)
    ET.fromstring((course.out / "junit.xml").read_text(encoding="utf-8"))


def test_feedback_says_what_the_public_cases_found_and_of_hidden_ones_a_fixed_word(course: Class) -> None:
    leak = ExerciseResult("4.1", 0, 2, "failed", "", "hidden tests: expected 4217")
    detail = Incident("tampering", "cell", "the secret seed is 4217")
    course.add(submission(exercises=(leak, SECOND), incidents=(detail, Incident("never heard of", "4217", "4217"))))
    course.write()
    page = course.page()
    assert "block 7 is in two tables (requests A and C)" in page and "Hidden tests: wrong value." in page
    assert INCIDENTS["tampering"] in page and "Hidden tests: failed." in page
    everything = [p.read_text(encoding="utf-8") for p in (*(course.out / "feedback").iterdir(), course.out / "junit.xml")]
    assert not any("4217" in one for one in everything)


def test_hidden_words_are_a_fixed_set() -> None:
    assert hidden_words("") == "" and hidden_words("hidden tests: time") == "hidden tests: time"
    assert hidden_words("4217") == "hidden tests: failed"


def test_every_word_of_the_grader_is_one_that_may_be_shown() -> None:
    from checks.grading.points import _HIDDEN, _WRONG

    assert all(hidden_words(said) == said for said in (*_HIDDEN.values(), _WRONG))


def test_feedback_files_stay_in_their_folder_and_are_never_shared(course: Class) -> None:
    names = ["../../etc/passwd", "a/b", "a_b", "Ada", "ada", "con", "محمد", "", "." * 9, "x" * 300]
    course.add(*(submission(name) for name in names))
    made = [file_name(student).lower() for student in read_book(course.state).students]
    assert len(set(made)) == len(names) and all(re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,80}\.html", name) for name in made)
    assert "ada.html" in made and "con.html" not in made


def test_an_unreadable_file_is_told_to_its_student(course: Class) -> None:
    course.add(
        submission(), submission(lab="", file="broken.ipynb", exercises=(), quizzes=(), incidents=(Incident("empty", "f"),))
    )
    assert "broken.ipynb" in course.page() and INCIDENTS["empty"] in course.page()
    assert course.rows("incidents.csv")[1][:4] == ["ada", "", "broken.ipynb", "empty"]


# ------------------------------------------------------------------------------------------------------------------ LMS

CANVAS = """\
Student,ID,SIS User ID,SIS Login ID,Section,Lab 4: Paged KV (98765),Final Score
    Points Possible,,,,,4.5,(read only)
,,,,,Manual Posting,
"Lovelace, Ada",101,S1,ada@x.org,Mon,,
"Hopper, Grace",102,S2,grace@x.org,Mon,,
"""
MOODLE = """\
First name,Last name,ID number,Email address,Course total (Real)
Ada,Lovelace,S1,ada@x.org,-
Grace,Hopper,S2,grace@x.org,-
"""


@pytest.mark.parametrize(
    "called", ["ada@x.org", "ada", "S1", "lovelaceada_101_5551_04.ipynb", "lovelaceada_LATE_101_7", "Lovelace, Ada"]
)
def test_canvas_gets_back_the_columns_it_knows_its_people_by(course: Class, called: str) -> None:
    course.add(submission(called.removesuffix(".ipynb")), submission("stranger"))
    course.roster(CANVAS)
    assert course.rows("canvas.csv") == [
        ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "Lab 4: Paged KV (98765)"],
        ["    Points Possible", "", "", "", "", "4.5"],
        ["Lovelace, Ada", "101", "S1", "ada@x.org", "Mon", "2.5"],
        ["Hopper, Grace", "102", "S2", "grace@x.org", "Mon", ""],
    ]


@pytest.mark.parametrize("called", ["ada@x.org", "S1", "Ada Lovelace", "Ada Lovelace_4711_assignsubmission_file"])
def test_moodle_gets_grade_and_feedback_of_each_lab(course: Class, called: str) -> None:
    course.add(submission(called))
    course.roster(MOODLE)
    header, ada, grace = course.rows("moodle.csv")
    assert header == ["First name", "Last name", "ID number", "Email address", "Lab 04", "Lab 04 feedback"]
    assert ada == ["Ada", "Lovelace", "S1", "ada@x.org", "2.5", "4.1: 2 of 2; 4.2: 0 of 2; 4.q1: 0.5 of 0.5"]
    assert grace == ["Grace", "Hopper", "S2", "grace@x.org", "", ""]


def test_moodles_worksheet_names_people_by_their_number_in_file_names(course: Class) -> None:
    course.add(submission("Somebody Else_12345_assignsubmission_file"))
    course.roster("Identifier,Full name,Email address,Grade\nParticipant 12345,Ada Lovelace,ada@x.org,\n")
    assert course.rows("moodle.csv")[1][:4] == ["Participant 12345", "Ada Lovelace", "ada@x.org", "2.5"]


def test_two_people_of_one_name_are_not_mixed_up(course: Class) -> None:
    course.add(submission("Ada Lovelace"))
    course.roster("First name,Last name,ID number,Email address\nAda,Lovelace,1,a@x.org\nAda,Lovelace,2,b@x.org\n")
    assert [row[0] for row in course.rows("gradebook.csv")[1:]] == ["1", "2", "Ada Lovelace"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "is empty"),
        ("student\nada\nada\n", "two students are 'ada'"),
        ("student,section\nada,1\n,2\n", "line 3"),
        ("student,name\n\nada,A\nada,B\n", "line 4"),
        ('student,name\nada,"A\nbob,B"\n', "roster.csv, line 2: a quotation mark"),
        ('student\n"a"b\n', "roster.csv, line 2"),
        (f"student,name\nada,{'x' * 140_000}\n", "roster.csv, line 2: field larger"),
    ],
)
def test_a_roster_that_cannot_be_meant_is_refused(tmp_path: Path, content: str, why: str) -> None:
    path = tmp_path / "roster.csv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(RosterError, match=why):
        read_roster(path)


# ------------------------------------------------------------------------------------------------------------ overrides


def test_an_override_counts_and_its_reason_is_told(course: Class) -> None:
    course.add(submission("ada"), submission("bob"))
    course.overrides("*,4.2,1,the check was too strict", "bob,4.2,max,shown in the lab")
    assert [row[2] for row in course.rows("gradebook.csv")[1:]] == ["1", "2"]
    assert "too strict" in course.page("ada") and "shown in the lab" in course.page("bob")
    assert all('"points": 0' in p.read_text() for p in course.state.iterdir())  # the record stays what it was


def test_in_feedback_an_override_stands_in_place_of_the_checks_word(course: Class) -> None:
    course.add(submission("ada"))
    course.overrides("ada,4.2,1.5,half of it was explained", "ada,4.1,0,by agreement")
    page = course.page("ada")
    rows = {m[1]: m[2] for m in re.finditer(r'<th scope="row">(4\.[12]).*?</th>(.*?)</tr>', page)}
    for item, points in (("4.1", "0 of 2"), ("4.2", "1.5 of 2")):
        assert "set by your instructor" in rows[item] and f">{points}<" in rows[item]
        assert "not right" not in rows[item] and "passed" not in rows[item]
    assert "<strong>1.5 of 2 points</strong>, because: half of it was explained" in page
    assert "What the check had said: not right." in page and "block 7 is in two tables" in page


def test_junit_has_an_overrides_word_too(course: Class) -> None:
    course.add(submission("ada"), submission("bob"))
    course.overrides("ada,4.2,max,the check was wrong", "bob,4.2,1,half")
    course.write()
    root = ET.parse(course.out / "junit.xml").getroot()
    assert {k: root.get(k) for k in ("tests", "failures")} == {"tests": "6", "failures": "1"}
    (failure,) = root.iter("failure")
    assert failure.get("message") == "set by the instructor, 1 of 2 points: half"


@pytest.mark.parametrize("called", ["ada@x.org", "Ada@X.org", "Lovelace, Ada", "lovelaceada_101_5551", "S1", "LovelaceAda_101"])
def test_an_override_names_a_student_in_any_way_that_is_theirs(course: Class, called: str) -> None:
    course.add(submission("lovelaceada_101_5551"), submission("stranger"))
    course.roster(CANVAS)
    course.overrides(f'"{called}",4.2,max,shown in the lab', "stranger,4.2,1,a guest")
    points = {row[0]: row[2] for row in course.rows("gradebook.csv")[1:]}
    assert points == {"ada@x.org": "2", "grace@x.org": "0", "stranger": "1"}


def test_an_override_takes_a_name_as_gradebook_csv_shows_it(course: Class) -> None:
    course.add(submission("=ada"))
    shown = course.rows("gradebook.csv")[1][0]
    course.overrides(f"{shown},4.2,max,shown in the lab")
    assert shown == "'=ada" and course.rows("gradebook.csv")[1][2] == "2"


def test_an_override_for_nobody_names_who_there_is(course: Class) -> None:
    course.add(*(submission(f"student{i:02}") for i in range(20)), submission("ada"))
    for wrong, names in (("aada", "ada, and 20 more"), ("zzz", "ada, student00, student01")):
        course.overrides(f"{wrong},4.2,1,x")
        with pytest.raises(OverrideError, match=rf"line 2: there is no student '{wrong}'.*first column.*There are: {names}"):
            course.write()


def test_an_override_that_two_may_be_meant_by_is_refused(course: Class) -> None:
    course.roster("First name,Last name,ID number\nAda,Lovelace,7\nAda,Lovelace,8\n")
    course.overrides("Ada Lovelace,4.2,1,x")
    course.add(submission("7"))
    with pytest.raises(OverrideError, match=r"'Ada Lovelace' may be 7 or 8\. Write the one of gradebook\.csv's first column"):
        course.write()


def test_an_override_for_all_is_for_those_who_tried(course: Class) -> None:
    stub = replace(submission("bob"), exercises=(replace(submission("bob").exercises[0], points=0, status="not_attempted"),))
    course.add(submission("ada"), stub)
    course.overrides(f"*,{stub.exercises[0].exercise},max,the check was wrong")
    points = {row[0]: float(row[1]) for row in course.rows("gradebook.csv")[1:]}
    assert points["ada"] == stub.exercises[0].max_points > points["bob"]


def test_a_line_for_one_student_counts_before_a_line_for_all_wherever_it_stands(course: Class) -> None:
    course.add(submission("ada"), submission("bob"))
    course.overrides("bob,4.2,max,shown in the lab", "*,4.2,1,the check was too strict")
    assert [row[2] for row in course.rows("gradebook.csv")[1:]] == ["1", "2"]


def test_an_override_for_all_waits_for_who_could_not_be_graded(course: Class) -> None:
    error = ExerciseResult("4.2", 0, 2, "error")
    course.add(submission("ada", exercises=(FIRST, error), incidents=(Incident("grader_error", "04.ipynb"),)))
    course.add(submission("bob", exercises=(FIRST, error), incidents=(Incident("cannot_check", "4.2"),)))  # it was no stub
    course.overrides("*,4.2,max,the check was wrong")
    assert [row[2] for row in course.rows("gradebook.csv")[1:]] == ["0", "2"]


@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
def test_an_accent_may_be_encoded_in_either_way(
    course: Class, forms: tuple[Literal["NFC", "NFD"], Literal["NFC", "NFD"]]
) -> None:
    here, there = (unicodedata.normalize(form, "zoë") for form in forms)
    assert here != there
    course.add(submission(here))
    course.overrides(f"{there},4.2,max,shown in the lab")
    assert course.rows("gradebook.csv")[1][2] == "2"
    course.roster(f"student,login\n7,{there}\n")
    assert [row[0] for row in course.rows("gradebook.csv")[1:]] == ["7"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "line 1: no student, item, points, reason. The file begins with the names"),
        ("\n\nada,4.2,1,x\n", "line 3: no student, item"),
        ("student,item,points,reason\n\n\nada,4.9,1,x\n", "line 4: there is no '4.9'"),
        ("student,item,points,reason\n\nada,4.2,much,x\n", "line 3: points are a number"),
        (
            'student,item,points,reason\nada,4.2,1,"half\nbob,4.2,2,"all"\n',
            "line 2: a quotation mark is not closed on its line",
        ),
        ('student,item,points,reason\nada,4.2,1,"half\nand more"\n', "line 2: a quotation mark is not closed on its line"),
        ('student,item,points,reason\nada,4.2,1,"a"b\n', "line 2: "),
        (f"student,item,points,reason\n\nada,4.2,1,{'x' * 140_000}\n", "line 3: field larger than field limit"),
        ("student,item,points,reason\nada,4.2,1,half, and more\n", "line 2: 5 columns, and not 4"),
    ],
)
def test_an_overrides_file_that_cannot_be_meant_names_the_line_of_the_file(course: Class, content: str, why: str) -> None:
    course.add(submission("ada"), submission("bob"))
    course.overrides()
    (course.folder / "overrides.csv").write_text(content, encoding="utf-8")
    with pytest.raises(OverrideError, match=rf"overrides\.csv, {re.escape(why)}"):
        course.write()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("ada,4.9,1,x", "there is no '4.9'"),
        ("eve,4.2,1,x", "no student 'eve'. A student is named as in gradebook.csv's first column"),
        ("ada,4.2,3,x", "at most 2 points"),
        ("ada,4.2,-1,x", "0 or more"),
        ("ada,4.2,nan,x", "0 or more"),
        ("ada,4.2,much,x", "a number or `max`"),
        ("ada,4.2,1,", "no reason"),
        ("ada,4.2", "no points, reason"),
    ],
)
def test_an_override_that_cannot_be_meant_names_its_line(course: Class, line: str, why: str) -> None:
    course.add(submission())
    course.overrides(line)
    with pytest.raises(OverrideError, match=f"line 2: .*{re.escape(why)}|line 2: {re.escape(why)}"):
        course.write()


# --------------------------------------------------------------------------------------------------- reports and JUnit


def test_junit_counts_add_up(course: Class) -> None:
    third = ExerciseResult("4.3", 0, 1, "not_attempted")
    course.add(submission(exercises=(FIRST, SECOND, third, ExerciseResult("4.4", 0, 2, "error"))))
    course.write()
    root = ET.parse(course.out / "junit.xml").getroot()
    assert {k: root.get(k) for k in ("tests", "failures", "errors", "skipped")} == {
        "tests": "5", "failures": "1", "errors": "1", "skipped": "1",
    }  # fmt: skip
    (failure,) = root.iter("failure")
    assert "block 7 is in two tables" in (failure.text or "") and failure.get("type") == "failed"


def test_cells_of_the_notebook_are_told_in_fixed_words(course: Class) -> None:
    cells = (
        CellResult("setup", None, "passed"),
        CellResult("exercise-4-2", "4.2", "failed", "4217"),
        CellResult("x", None, "not_run"),
    )
    course.add(submission(nbval=cells))
    course.write()
    page, junit = course.page(), (course.out / "junit.xml").read_text(encoding="utf-8")
    assert "1 of its 3 code cells worked" in page and "<code>exercise-4-2</code>: it did not run" in page
    assert "4217" not in page + junit
    assert ET.fromstring(junit).get("tests") == "6"


def test_the_report_shows_spread_hardest_and_commonest_and_names_nobody(course: Class) -> None:
    for i in range(6):
        wrong = ExerciseResult("4.2", 0, 2, "failed", f"row {i} of the output differs", category="wrong value")
        course.add(submission(f"student-{i}", exercises=(FIRST, wrong)))
    course.add(submission("student-7", exercises=(FIRST, ExerciseResult("4.2", 2, 2, "passed"))))
    course.write()
    page = (course.out / "report.html").read_text(encoding="utf-8")
    assert "student-" not in page
    assert page.count('role="img"') == page.count("<desc id=") == 2
    assert "4.2: 1 right, 6 not right, 0 not attempted" in page
    assert re.search(r"4\.2</th><td class=\"number\">6</td><td><pre>row 0 of the output differs", page)
    assert page.index('<th scope="row">4.2</th><td class="number">1 of 7') < page.index('<th scope="row">4.1</th>')


PRIVATE = "Berta is stupid"


@pytest.mark.parametrize(
    ("category", "message", "shown"),
    [
        ("exception", f"ValueError: {PRIVATE}\n    line 3 | raise x", "ValueError was raised."),
        ("exception", f"{PRIVATE.replace(' ', '')}: x", "An error that is none of Python&#x27;s own was raised."),
        ("syntax", f"Line 1 of the cell does not parse\n    1 | {PRIVATE}", "The cell does not parse."),
        ("missing function", f"Expected f(x), found {PRIVATE}.", "No function of the name that is asked for."),
        ("undefined name", f"{PRIVATE} is not defined", "A name is used that the cell does not define."),
        ("does not compile", f"line 3: {PRIVATE}", "It does not compile."),
        ("exit", f"The code ended itself\n line 4 | {PRIVATE}", "not right"),
        ("", PRIVATE, "not right"),
        ("wrong value", f'it raised KeyError ("{PRIVATE} "x"") although 3 blocks are free.', "it raised KeyError although 3"),
        ("wrong value", f'it raised Berta ("{PRIVATE}").', "it raised an error of its own."),
        (
            "wrong value",
            f"It returned {PRIVATE!r}; request 'A' has 3 tokens.",
            "It returned (a text); request &#x27;A&#x27; has",
        ),
        ("wrong value", f"It returned {PRIVATE + chr(39)!r}.", "It returned (a text)."),
        ("wrong type", f"The result could not be read (KeyError: {PRIVATE}).", "The result could not be read."),
        ("wrong type", "It should return a tensor, and returned a Berta.", "and returned a …."),
        (
            "wrong value",
            "each block is in this list twice, and it raised BertaError. When",
            "it raised an error of its own. When",
        ),
        (
            "wrong value",
            "The second one raised ValueError, and the first one raised nothing.",
            "raised ValueError, and the first",
        ),
        ("wrong value", "reader A got a student_cell.Berta", "reader A got a "),
        ("wrong value", "reader A got a student_cell.ベルタ_Berta", "reader A got a "),
        ("wrong value", f"It returned {PRIVATE.encode()!r}.", "It returned (a text)."),
        ("wrong value", f"It returned '{PRIVATE}, and so on, ", "It returned (a text)"),
        ("wrong value", "It returned 'Berta; request 'A' has", "It returned"),
    ],
)
def test_the_report_quotes_no_student(course: Class, category: str, message: str, shown: str) -> None:
    told = (ExerciseResult("4.2", 0, 2, "failed", message, category=category),)
    course.add(submission("ada", exercises=told))
    course.write()
    alone = (course.out / "report.html").read_text(encoding="utf-8")
    assert "Berta" not in alone and "stupid" not in alone
    course.add(submission("bob", exercises=told))
    course.write()
    page = (course.out / "report.html").read_text(encoding="utf-8")
    assert "Berta" not in page and "stupid" not in page
    assert shown in page


def test_what_one_student_alone_was_told_is_a_kind_of_failure(course: Class) -> None:
    for student, said in (
        ("ada", "block 7 is free"),
        ("bob", "block 7 is free"),
        ("cem", "row 3 differs"),
        ("dan", "it raised"),
    ):
        told = ExerciseResult("4.2", 0, 2, "failed", said, category="wrong value")
        course.add(submission(student, exercises=(told,)))
    course.write()
    page = (course.out / "report.html").read_text(encoding="utf-8")
    assert re.search(r'4\.2</th><td class="number">2</td><td><pre>block 7 is free', page)
    assert re.search(r'4\.2</th><td class="number">2</td><td><pre>The result is another than asked for', page)
    assert "row 3" not in page and "it raised" not in page


def test_a_type_that_several_returned_is_named(course: Class) -> None:
    told = ExerciseResult("4.2", 0, 2, "failed", "It should return a list, and returned a tensor.", category="wrong type")
    course.add(submission("ada", exercises=(told,)), submission("bob", exercises=(told,)))
    course.write()
    assert "and returned a tensor." in (course.out / "report.html").read_text(encoding="utf-8")


def test_the_report_warns_of_what_was_not_graded_or_not_isolated(course: Class) -> None:
    course.add(submission(exercises=(ExerciseResult("4.1", 0, 2, "error"),)))
    course.write()
    page = (course.out / "report.html").read_text(encoding="utf-8")
    assert "could not be graded" in page and "not isolated" in page


def test_a_class_that_handed_nothing_in_has_all_files(course: Class) -> None:
    course.write()
    made = {p.name for p in course.out.iterdir()}
    assert made >= {"gradebook.csv", "canvas.csv", "moodle.csv", "incidents.csv", "junit.xml", "report.html"}
    assert course.rows("gradebook.csv") == [["student", "total", "max"]]


@given(st.lists(st.floats(0, 12)), st.sampled_from([0.5, 1.0, 5.0, 12.0, 21.0, 97.0]))
def test_a_histogram_counts_everybody_once(values: list[float], most: float) -> None:
    values = [min(v, most) for v in values]
    bins = bins_of(values, most)
    assert sum(n for *_, n in bins) == len(values) and len(bins) <= 10 and bins[-1][1] == most
    ET.fromstring(re.sub("<details>.*</details>", "", histogram("k", "Points", bins)))


def test_figures_of_one_page_share_no_ids() -> None:
    markup = stacked("a", "A & B", [Split("4.1", 1, 2, 0)]) + stacked("b", "B", [Split("4.1", 0, 0, 0)])
    ids = re.findall(r' id="([^"]+)"', markup)
    assert len(ids) == len(set(ids)) and "A &amp; B" in markup
