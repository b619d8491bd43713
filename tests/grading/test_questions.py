"""What counts as an answer to a question: the form it was asked for, and where a number can be judged, that it may be right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checks.grading.arithmetic import number_of
from checks.grading.one import official
from checks.grading.points import Grader
from checks.grading.questions import mark
from checks.grading.rebuild import Answer, rebuild
from checks.grading.records import QuizResult
from checks.grading.trees import Trees
from checks.student.ipynb import parse_notebook
from checks.student.questions import QUIZZES, Question, may_be_right, read_questions, value, written_number
from checks.student.quiz import find_question
from tests.grading import mangled

NUMERIC = [q for path in sorted(QUIZZES.glob("*.yaml")) for q in read_questions(path).values() if q.draw]


def marked(question: str, expression: str, student: str | None = None) -> QuizResult:
    grader = Grader(Trees(Path("nowhere")), "secret")
    return mark(grader, find_question(question), Answer(expression, f"quiz({question!r}, {expression})"), 0.5, student)


@pytest.mark.parametrize("answer", ['"c"', '"C"', "' c) '", '"a"'])
def test_a_choice_counts_right_or_wrong(answer: str) -> None:
    assert (marked("4.q1", answer).status, marked("4.q1", answer).points) == ("answered", 0.5)


@pytest.mark.parametrize("answer", ['"zz"', "3", "True", '["a"]', '("a", "b")', '"a b"', "None", "lambda: 'a'", "{}"])
def test_what_is_no_choice_is_no_answer_and_the_choices_are_told(answer: str) -> None:
    result = marked("4.q1", answer)
    assert (result.status, result.points) == ("not_answered", 0)
    assert result.message == "It is answered with one of its choices, a, b, c; this is none."


@pytest.mark.parametrize("answer", ['"many"', "True", "[672]", "(1, 2)", "None", "{}", '"requests * 3"', 'f"{672}"', "{672}"])
def test_what_is_neither_number_nor_formula_is_no_answer(answer: str) -> None:
    result = marked("4.q4", answer)
    assert (result.status, result.points) == ("not_answered", 0)
    assert "lambda requests, tokens: ... This is neither." in result.message


@pytest.mark.parametrize(
    "written",
    ["{n} * (-{t} % 16)", "round({n} * (-{t} % 16))", "float({right})", "int({right} + 0.2)", "max({right}, 1)", "{right} / 1"],
)
def test_a_number_written_as_arithmetic_is_a_number(written: str) -> None:
    asked = find_question("4.q4")
    numbers = asked.numbers("somebody")
    right = int(value(asked.answer or "", numbers))
    assert right > 1
    expression = written.format(n=numbers["requests"], t=numbers["tokens"], right=right)
    assert (marked("4.q4", expression, "somebody").status, marked("4.q4", expression).status) == ("right", "answered")
    assert marked("4.q4", f"{expression} + 100", "somebody").message == f"{right + 100} is not it, for your numbers."


def test_a_name_that_the_cell_gives_a_number_is_that_number() -> None:
    asked = find_question("4.q4")
    numbers = asked.numbers("somebody")
    cell = f"r, s = 1, 2\nn = {numbers['requests']}\nwaste = n * (-{numbers['tokens']} % 16)\nquiz('4.q4', waste)"
    grader = Grader(Trees(Path("nowhere")), "secret")
    assert mark(grader, asked, Answer("waste", cell), 0.5, "somebody").status == "right"
    assert number_of("waste", cell.replace("quiz", "waste += 1\nquiz")) is None  # changed since


@pytest.mark.parametrize(
    "call", ["quiz(question='4.q1', answer='b')", "mine = 'b'\nquiz('4.q1', mine)", "quiz('4.q1', answer='b')"]
)
def test_an_answer_by_keyword_or_through_a_name_is_read(call: str) -> None:
    lab, raw = official("04"), json.loads(next(mangled.ROOT.glob("labs/04_*.ipynb")).read_text(encoding="utf-8"))
    cell = next(cell for cell in raw["cells"] if 'quiz("4.q1"' in "".join(cell["source"]))
    cell["source"] = [call]
    rebuilt = rebuild(lab, parse_notebook(Path("x.ipynb"), json.dumps(raw)))
    assert rebuilt.answers["4.q1"].value == "b"
    assert any("quiz(\"4.q1\", 'b')" in "".join(cell["source"]) for cell in rebuilt.raw["cells"])


def test_a_decimal_comma_is_read_by_neither_the_lab_nor_grading() -> None:
    result = marked("4.q4", '"3,5"', "somebody")
    assert (result.status, result.message) == ("not_answered", "A number has a point, and a comma between thousands: 3.5?")
    assert written_number("3,5") is None and written_number("3,500") == 3500 and written_number(" 6 721") == 6721


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "9**9**9",
            "9.0**64**2",
            "1 / 0",
            "round(1.5, -10**9)",
            "(-8) ** 0.5",
            "int('9' * 9)",
            "abs(True)",
            "open(1)",
            "x",
            "[1]",
        ),
        *("+".join(["1"] * 500), "max()", "float('nan')", "max(1, key=print)", "1 if 1 else 2", "(" * 500 + "1" + ")" * 500),
    ],
)
def test_what_is_not_arithmetic_or_takes_long_is_no_number(expression: str) -> None:
    assert number_of(expression) is None


HUGE = "0x" + "f" * 5000  # more decimal digits than Python writes


@pytest.mark.parametrize("question", ["4.q1", "4.q4"])
def test_a_number_of_thousands_of_digits_is_no_answer(question: str) -> None:
    raw = mangled.lab({}, {question: HUGE})
    raw["cells"].append({**raw["cells"][-1], "id": "own", "cell_type": "code", "source": f"quiz({HUGE}, 'a')"})
    answer = rebuild(official("04"), parse_notebook(Path("x.ipynb"), json.dumps(raw))).answers[question]
    grader = Grader(Trees(Path("nowhere")), "secret")
    assert mark(grader, find_question(question), answer, 0.5, None).status == "not_answered"
    assert question == "4.q4" or marked(question, HUGE).status == "not_answered"


def drawn(answer: str, **draw: tuple[int, int]) -> Question:
    return Question("4.q9", "?", {}, answer, draw, (), "")


def test_an_answer_without_drawn_numbers_may_be_right() -> None:
    assert may_be_right(drawn("5", n=(1, 9)), 5) and not may_be_right(drawn("5", n=(1, 9)), 6)


def test_numbers_too_large_for_floats_are_not_judged_wrong() -> None:
    asked = drawn("n ** 7 % 16", n=(1000, 10_999))
    assert all(may_be_right(asked, value(asked.answer or "", {"n": n})) for n in range(1000, 1032))
    asked = drawn("n ** 8 * m", n=(9000, 9999), m=(1, 3))  # over 2^63
    assert may_be_right(asked, 9500.0**8 * 2) and not may_be_right(asked, 1.0)


def test_a_plain_number_without_the_students_numbers_counts_where_it_may_be_right() -> None:
    asked = find_question("4.q4")
    possible = f"{value(asked.answer or '', asked.numbers('somebody')):g}"
    assert marked("4.q4", possible).status == "answered" and "did not come along" in marked("4.q4", possible).message
    for never in ("7", "-30", "5000", "1e12", '"0.5"'):
        assert marked("4.q4", never).status == "wrong" and marked("4.q4", never).points == 0
    assert marked("4.q4", possible, "somebody").status == "right"


@pytest.mark.parametrize("asked", NUMERIC, ids=lambda asked: asked.id)
def test_every_right_number_may_be_right(asked) -> None:  # type: ignore[no-untyped-def]
    for student in range(60):
        wanted = value(asked.answer, asked.numbers(str(student)))
        assert all(may_be_right(asked, given) for given in (wanted, wanted * 1.004, round(wanted, 1)))
    assert not may_be_right(asked, 1e9) and not may_be_right(asked, -1.0)
