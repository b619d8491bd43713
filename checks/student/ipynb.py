"""Notebook files as students have them: renamed, of an old format, without cell ids, damaged. Read with `json` alone, so that
one odd field never hides a student's work.

What a notebook is, its metadata says ("minivllm": {"lab": "04", ...}); its file name says nothing.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks.exercises import Row, table
from checks.student.calls import question_calls

MAX_BYTES = 50 << 20  # a lab with all its outputs is under one MiB
_CHECKED = re.compile(r"""^check\(["'](?P<id>\d+\.\d+)["']""", re.MULTILINE)
_STUB = re.compile(r"""NotImplementedError\(["']Exercise (?P<id>\d+\.\d+):""")


class Unreadable(ValueError):
    """A file that is no notebook. The message says why, in words for its owner."""


@dataclass(frozen=True)
class Cell:
    """One cell. `id` is "" where the file has none; `exercise` is the exercise it is, if it is one; `raw` is the file's."""

    kind: str
    id: str
    text: str
    exercise: str | None
    raw: dict[str, Any]

    @property
    def own(self) -> dict[str, Any]:
        """What the builder wrote into the cell's metadata."""
        found = self.raw.get("metadata", {}).get("minivllm")
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Notebook:
    path: Path
    lab: str | None  # "04"; None if it is no lab of ours, or has lost its metadata
    cells: list[Cell]
    raw: dict[str, Any]


def read_notebook(path: Path) -> Notebook:
    """Raises Unreadable, saying what is wrong with the file."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise Unreadable(f"it has {size / 1e6:.0f} MB; clear its outputs and save it again")
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise Unreadable("it is not text in UTF-8") from None
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from None
    return parse_notebook(path, text)


def parse_notebook(path: Path, text: str) -> Notebook:
    """`read_notebook` of a text; `path` only names it."""
    if not text.strip():
        raise Unreadable("it is empty")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        raise Unreadable("it is not JSON, so no notebook, or one that was cut off while it was saved") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("nbformat"), int):
        raise Unreadable("it is JSON, and not a notebook")
    if raw["nbformat"] != 4 or not isinstance(raw.get("cells"), list):
        raise Unreadable(
            f"it is of notebook format {raw['nbformat']}; save it as format 4 with `jupyter nbconvert --to notebook`"
        )
    if not isinstance(raw.get("metadata"), dict):
        raw["metadata"] = {}
    ours = raw["metadata"].get("minivllm")
    lab = str(ours["lab"]) if isinstance(ours, dict) and "lab" in ours else None
    return Notebook(path, lab, [_cell(cell) for cell in raw["cells"] if isinstance(cell, dict)], raw)


def _cell(raw: dict[str, Any]) -> Cell:
    source = raw.get("source", "")
    text = "".join(map(str, source)) if isinstance(source, list) else str(source)
    if not isinstance(raw.get("metadata"), dict):
        raw["metadata"] = {}
    kind, name = str(raw.get("cell_type", "")), raw.get("id")
    cell = Cell(kind, name if isinstance(name, str) else "", text, None, raw)
    return Cell(cell.kind, cell.id, text, _exercise_of(cell), raw)


def _exercise_of(cell: Cell) -> str | None:
    """By id, then by metadata, then by what the cell says itself: its call of check, or its stub."""
    for exercise in table():
        if cell.id == f"exercise-{exercise.replace('.', '-')}":
            return exercise
    named = cell.own.get("exercise")
    if isinstance(named, str) and named in table():
        return named
    said = (_CHECKED.search(cell.text) or _STUB.search(cell.text)) if cell.kind == "code" else None
    return said["id"] if said and said["id"] in table() else None


def answers_in(notebook: Notebook, row: Row) -> list[str]:
    """The texts of the cells that are an exercise, in the notebook's order."""
    return [cell.text for cell in notebook.cells if cell.exercise == row.id]


def replies_in(notebook: Notebook) -> Iterator[tuple[str, str, Any]]:
    """(verb, question, answer) of the notebook's calls quiz("4.q1", "c") and predict(...), where the answer is a value as it
    stands there, or has a name there. A formula is code, and is left to the notebook."""
    for cell in notebook.cells:
        for call in question_calls(cell.text) if cell.kind == "code" else ():
            if call.answer is not None:
                with contextlib.suppress(ValueError, TypeError, RecursionError, MemoryError):  # code
                    yield call.verb, call.question, ast.literal_eval(call.answer)
