"""The points of a lab's questions. A choice counts as completion: it was explained on the spot, right or wrong. A numeric
question is marked, with the numbers drawn for its student.

A formula is tried on numbers of this run's own, in a child like any student's code. A plain number, also one that is written as
arithmetic, can be marked where the student's id came along (a packed work has it); else it counts as answered, and says so, if
it is right for any numbers that the question draws. What has not the form of an answer (no choice, no number, no formula) is no
answer.
"""

from __future__ import annotations

import ast
import math
from typing import Any

from checks.grading.arithmetic import number_of
from checks.grading.isolation import jail_for
from checks.grading.points import Grader
from checks.grading.rebuild import Answer
from checks.grading.records import QuizResult, QuizStatus
from checks.sandbox.cell import own_source
from checks.sandbox.sandbox import Limits, Request, Unavailable, run_in_child
from checks.student.questions import Question, has_decimal_comma, may_be_right, written_number
from checks.student.quiz import is_right

_ROUNDS = 3
_LIMITS = Limits(cpu_seconds=2, wall_seconds=10, memory_bytes=256 << 20, output_bytes=1 << 20)


def mark(grader: Grader, asked: Question, answer: Answer | None, worth: float, student_id: str | None) -> QuizResult:
    """`student_id` draws the student's numbers; None where it is not known."""

    def result(status: QuizStatus, message: str = "") -> QuizResult:
        return QuizResult(asked.id, worth if status in ("right", "answered") else 0.0, worth, status, message)

    if answer is None or answer.is_open:
        return result("not_answered")
    if not asked.draw:
        if _choice(asked, answer.value) is None:
            return result("not_answered", f"It is answered with one of its choices, {', '.join(asked.choices)}; this is none.")
        return result("answered")
    number = _number(answer.value)
    if number is None:
        number = _number(number_of(answer.expression, answer.cell))
    if number is None and not _may_be_formula(answer):
        names = ", ".join(asked.draw)
        told = f"It is answered with a number, or with a formula: lambda {names}: ... This is neither."
        if isinstance(answer.value, str) and (point := has_decimal_comma(answer.value)):
            told = f"A number has a point, and a comma between thousands: {point}?"
        return result("not_answered", told)
    if number is None:
        right = _formula_is_right(grader, asked, answer)
        return result("right" if right else "wrong", "" if right else "The formula does not give the right numbers.")
    if student_id is None:
        if not may_be_right(asked, number):
            return result("wrong", f"{number:g} is not it, whatever numbers were drawn for you.")
        return result("answered", "Counted as answered: the numbers drawn for you did not come along with the notebook.")
    right = is_right(asked, number, student_id)
    return result("right" if right else "wrong", "" if right else f"{number:g} is not it, for your numbers.")


def _choice(asked: Question, value: Any) -> str | None:
    try:
        wanted = str(value)
    except ValueError:  # an integer of so many digits that Python does not write it
        return None
    wanted = wanted.strip(" \t\n.:()'\"").lower()
    return next((key for key in asked.choices if key.lower() in (wanted, wanted.replace(",", ""))), None)


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        value = written_number(value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if is_number and math.isfinite(value) else None


def _may_be_formula(answer: Answer) -> bool:
    """Whether the answer is to be computed: a function, a name, an expression. Not a text, a list, True, and the like; nor what
    does not parse."""
    try:
        tree = ast.parse(answer.expression, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    if isinstance(tree, (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.JoinedStr)):
        return isinstance(answer.value, (int, float)) and not isinstance(answer.value, bool)  # too large for a number of ours
    return True


def _formula_is_right(grader: Grader, asked: Question, answer: Answer) -> bool:
    """Whether the answer, a function of the drawn numbers, or an expression without them, is right for all of this run's."""
    students = [f"{grader.secret}:{asked.id}:{i}" for i in range(_ROUNDS)]
    try:
        own = own_source(answer.cell)
        is_function = isinstance(ast.parse(answer.expression, mode="eval").body, (ast.Lambda, ast.Name, ast.Attribute))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    formula = answer.expression if is_function else f"lambda **_: {answer.expression}"
    request = Request(
        source=f"{own}\nformula = {formula}\n",
        filename=f"<question {asked.id}>",
        functions=(),
        runner="checks.sandbox.formula",
        exercise="formula",
        cases=[{"numbers": asked.numbers(student)} for student in students],
        strict=True,
        forbidden=grader.forbidden,
    )
    try:
        outcome = run_in_child(request, _LIMITS, jail=jail_for(grader.trees))
    except Unavailable:
        return False
    given = [_number(m.get("output")) for m in outcome.messages if m["kind"] == "result"]
    return len(given) == _ROUNDS and all(
        number is not None and is_right(asked, number, student) for number, student in zip(given, students, strict=True)
    )
