"""What counts as an answer to a question: the form it was asked for, and where a number can be judged, that it may be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from checks.grading.points import Grader
from checks.grading.questions import mark
from checks.grading.rebuild import Answer
from checks.grading.records import QuizResult
from checks.grading.trees import Trees
from checks.student.questions import QUIZZES, may_be_right, read_questions, value
from checks.student.quiz import find_question

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
