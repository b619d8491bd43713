"""What each exercise and question of a lab counts. Fixed by the lab's source alone, whatever is handed in.

    # %% id="exercise-4-5" points=4          in solutions/NN_slug.py, on an exercise's cell or a question's

Where the source says nothing, an exercise counts its difficulty (1, 2 or 3), an optional one 0 (it is checked and reported),
and a question half a point.
"""

from __future__ import annotations

import ast
from pathlib import Path

from checks.authoring.source import SOLUTIONS, Cell, Missing, Source, SourceError, read_source
from checks.exercises import check_of, find, table

QUESTION = 0.5


def worth(lab: str) -> dict[str, float]:
    """The most points of every exercise ("4.1") and quiz question ("4.q1") of a lab, in the lab's order. Raises Missing if the
    lab's source is not here."""
    return worth_of(source_of(lab))


def source_of(lab: str) -> Source:
    found: list[Path] = sorted(SOLUTIONS.glob(f"{lab.zfill(2)}_*.py"))
    if not found:
        raise Missing(f"The source of Lab {lab} is not in {SOLUTIONS.name}/.")
    return read_source(found[0])


def worth_of(source: Source) -> dict[str, float]:
    """Raises SourceError for points that are given twice, or where nothing is asked."""
    found: dict[str, float] = {}
    for cell in source.cells:
        items = [cell.exercise] if cell.exercise else quiz_questions(cell)
        if cell.points is not None and len(items) != 1:
            raise SourceError(f"{source.path.name}:{cell.line}: points= belongs on a cell with one exercise or question")
        for item in items:
            if item in found:
                raise SourceError(f"{source.path.name}:{cell.line}: {item} is asked twice")
            found[item] = float(cell.points) if cell.points is not None else _usual(item, bool(cell.exercise))
    return found


def quiz_questions(cell: Cell) -> list[str]:
    """The questions a cell asks with quiz("...", ...). Predictions count nothing."""
    body = ast.parse(cell.text).body if cell.kind == "code" else []
    calls = [node.value for node in body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    return [
        str(call.args[0].value)
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "quiz" and call.args and isinstance(call.args[0], ast.Constant)
    ]


def _usual(item: str, is_exercise: bool) -> float:
    if not is_exercise:
        return QUESTION
    return 0.0 if table()[item].optional else float(check_of(find(item)).difficulty)
