"""The calls quiz("4.q1", ...) and predict(...) in a cell, read without running it: one reading for restoring, updating,
building and grading. May not know a notebook.
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass

from checks.sandbox.cell import parsed

VERBS = ("quiz", "predict")
_MAX_CELL = 200_000  # characters; an answer has some thousand


@dataclass(frozen=True, slots=True)
class QuestionCall:
    """`answer` is what is given by place or as `answer=`; for a name that the cell gives one plain value, that value; None
    where nothing is given. `lines`: the first and the last, counted from 1."""

    verb: str
    question: str
    answer: ast.expr | None
    lines: tuple[int, int]


def question_calls(text: str) -> list[QuestionCall]:
    """A code cell's calls, each a line of its own at the top level, that name a question. None for what is no Python."""
    tree = parsed(text) if len(text) <= _MAX_CELL else None
    found = []
    for node in tree.body if tree is not None else ():
        call = node.value if isinstance(node, ast.Expr) else None
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in VERBS:
            continue
        question, answer = _given(call, 0, "question"), _given(call, 1, "answer")
        if isinstance(answer, ast.Name):
            named = bound_once(text).get(answer.id)
            answer = named if isinstance(named, ast.Constant) else answer
        if isinstance(question, ast.Constant) and isinstance(question.value, str):
            lines = call.lineno, call.end_lineno or call.lineno
            found.append(QuestionCall(call.func.id, question.value, answer, lines))
    return found


def bound_once(text: str) -> dict[str, ast.expr]:
    """The names that a cell binds once, at its top, and to what, in order."""
    tree = parsed(text) if len(text) <= _MAX_CELL else None
    if tree is None:
        return {}
    times = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load))
    bound = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if times[name] == 1:
                bound[name] = node.value
    return bound


def _given(call: ast.Call, place: int, name: str) -> ast.expr | None:
    by_keyword = [keyword.value for keyword in call.keywords if keyword.arg == name]
    return next(iter([*call.args[place : place + 1], *by_keyword]), None)
