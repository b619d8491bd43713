"""The notebook that is graded: the official lab, cell by cell, with only the student's exercises and answers in it.

So an edited or deleted check, a skip tag, a cell moved or turned into text changes nothing, and is told to the instructor.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field
from typing import Any

from checks.exercises import table
from checks.exercises.evaluate import before_running
from checks.grading.records import Incident
from checks.sandbox.cell import own_source
from checks.student.calls import question_calls
from checks.student.ipynb import Cell, Notebook
from checks.student.quiz import OPEN

_SKIP_TAGS = frozenset({"nbval-skip", "skip-execution", "raises-exception", "nbval-raises-exception", "nbval-ignore-output"})
_SKIP_COMMENT = re.compile(r"^\s*#\s*(NBVAL_\w+|PYTEST_VALIDATE_IGNORE_OUTPUT)\b.*$", re.MULTILINE)
MAX_CELL = 200_000  # characters; an answer has some thousand


@dataclass
class Rebuilt:
    """`raw` is the notebook, without outputs. `sources` has the student's text of each exercise of the lab, None where there is
    no cell for it; `answers` the student's quiz calls, by question."""

    raw: dict[str, Any]
    sources: dict[str, str | None] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)
    incidents: list[Incident] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """A call quiz("4.q1", ...) of a student: the expression as text, and the cell it stands in."""

    expression: str
    cell: str

    @property
    def value(self) -> Any:
        """The answer, if it is a plain value; else None."""
        try:
            return ast.literal_eval(self.expression)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return None

    @property
    def is_open(self) -> bool:
        value = self.value
        return isinstance(value, str) and value.strip() in (OPEN, "")


def rebuild(official: Notebook, mine: Notebook) -> Rebuilt:
    """Changes neither notebook."""
    raw = json.loads(json.dumps({**official.raw, "cells": [], "nbformat": 4, "nbformat_minor": 5}))
    rebuilt = Rebuilt(raw)
    answers = _answers(mine)
    for cell in official.cells:
        new = json.loads(json.dumps(cell.raw))
        if cell.kind == "code":
            new.update(outputs=[], execution_count=None)
        text = cell.text
        if cell.exercise and cell.kind == "code":
            chosen = _chosen(cell.exercise, mine, rebuilt.incidents)
            rebuilt.sources[cell.exercise] = None if chosen is None else _SKIP_COMMENT.sub("#", chosen.text)
            if chosen is not None:
                text = _with_official_check(_SKIP_COMMENT.sub("#", chosen.text), cell.exercise)
        elif asked := [call.question for call in question_calls(cell.text) if call.question in answers]:
            for name in asked:
                rebuilt.answers[name] = answers[name]
            text = _with_answers(cell.text, answers)
        new["source"] = text.splitlines(keepends=True)
        raw["cells"].append(new)
    return rebuilt


# ----------------------------------------------------------------------------------------------------------- exercises


def _chosen(exercise: str, mine: Notebook, incidents: list[Incident]) -> Cell | None:
    """The student's cell of an exercise: by its stable id, and by what it says itself; of several, the last with work in it."""
    cells = [cell for cell in mine.cells if cell.exercise == exercise]
    if not cells:
        incidents.append(Incident("check_deleted", exercise, "there is no cell for this exercise"))
        return None
    worked = [cell for cell in cells if not is_stub_text(exercise, cell.text)]
    if len(cells) > 1:
        told = f"{len(cells)} cells; the last of {len(worked)} that are written counts" if worked else f"{len(cells)} cells"
        incidents.append(Incident("duplicate_cell", exercise, told))
    chosen = (worked or cells)[-1]
    incidents += _oddities(exercise, chosen)
    return chosen


def is_stub_text(exercise: str, text: str) -> bool:
    verdict = before_running(table()[exercise], text) if len(text) <= MAX_CELL else None
    return not text.strip() or (verdict is not None and verdict.category == "not attempted")


def written_in(mine: Notebook) -> int:
    """How many of a notebook's exercise cells have work in them."""
    return sum(not is_stub_text(cell.exercise, cell.text) for cell in mine.cells if cell.exercise)


def _oddities(exercise: str, cell: Cell) -> list[Incident]:
    """What was done to a cell beside solving it."""
    found = []
    tags = cell.raw["metadata"].get("tags")
    tags = [str(tag) for tag in tags] if isinstance(tags, list) else []
    comments = [match[1] for match in _SKIP_COMMENT.finditer(cell.text)]
    if skips := [*(tag for tag in tags if tag.lower() in _SKIP_TAGS), *comments]:
        found.append(Incident("skip_tag", exercise, ", ".join(skips)[:200]))
    if cell.kind != "code":
        found.append(Incident("check_changed", exercise, "the cell was turned into text"))
    elif not _ends_with_check(exercise, cell.text):
        has_other = re.search(r"^\s*#?\s*check\(", cell.text, re.MULTILINE)
        told = "its check was changed" if has_other else "its check was deleted"
        found.append(Incident("check_changed" if has_other else "check_deleted", exercise, told))
    if _rebinds_check(cell.text):
        found.append(Incident("tampering", exercise, "the cell defines or replaces what checks it"))
    return found


def _ends_with_check(exercise: str, text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    return bool(lines) and re.match(rf"""check\(\s*["']{re.escape(exercise)}["']\s*\)""", lines[-1]) is not None


def _rebinds_check(text: str) -> bool:
    """Whether the cell binds `check`, or assigns into the package of that name."""
    try:
        tree = ast.parse(text) if len(text) <= MAX_CELL else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == "check":
            return True
        if isinstance(node, ast.Name) and node.id == "check" and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _root_name(node) == "checks":
            return True
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.startswith("checks.") for name in names):
            return True
    return False


def _root_name(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _with_official_check(text: str, exercise: str) -> str:
    """The student's code without its own calls of the labs' verbs, and the lab's check behind it. What does not parse stays:
    its failure is the result."""
    try:
        own = own_source(text).rstrip("\n")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        own = text.rstrip("\n")
    return f'{own}\n\n\nfrom checks import check\ncheck("{exercise}")'


# ----------------------------------------------------------------------------------------------------------- questions


def _answers(mine: Notebook) -> dict[str, Answer]:
    """The student's answer to every question, wherever its call stands; of several, the last that is not open."""
    found: dict[str, Answer] = {}
    for cell in mine.cells:
        for call in question_calls(cell.text):
            if call.answer is None:
                continue
            answer, name = Answer(_unparsed(call.answer), cell.text), call.question.strip().lower()
            if not answer.is_open or name not in found:
                found[name] = answer
    return found


def _unparsed(answer: ast.expr) -> str:
    """An answer on one line; "..." for what Python does not write, as an integer of thousands of digits."""
    try:
        return ast.unparse(answer)
    except (ValueError, RecursionError):
        return "..."


def _with_answers(text: str, answers: dict[str, Answer]) -> str:
    """The official cell with the student's answers in its calls."""
    lines = text.splitlines()
    for call in reversed(question_calls(text)):
        answer = answers.get(call.question)
        if answer and not answer.is_open:
            first, last = call.lines
            lines[first - 1 : last] = f'{call.verb}("{call.question}", {answer.expression})'.splitlines()
    return "\n".join(lines)
