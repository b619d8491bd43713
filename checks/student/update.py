"""python -m checks update: the lab has a newer version, and what the student wrote stays.

Cells are told apart by their ids, which stay when a lab is rewritten. Of an exercise, a prediction or an answer the student's
cell is kept, at its place in the new lab; a cell the student added stays behind the cell it followed; every other cell is the
new lab's. The notebook as it was is kept first, so nothing can be lost, whenever this is interrupted.
"""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checks.exercises import table
from checks.exercises.evaluate import before_running
from checks.student.calls import QuestionCall, question_calls
from checks.student.failure import CheckFailed
from checks.student.home import ROOT, locked, new_backup, write_atomically
from checks.student.ipynb import Cell, Notebook, Unreadable, parse_notebook, read_notebook
from checks.student.quiz import OPEN


@dataclass
class Merged:
    """A new notebook, and what became of the student's cells, by id."""

    raw: dict[str, Any]
    kept: list[str] = field(default_factory=list)  # exercises, predictions and answers
    added: list[str] = field(default_factory=list)  # cells the lab does not have
    replaced: list[str] = field(default_factory=list)  # cells of the lab whose text was another


def merge(mine: Notebook, official: Notebook) -> Merged:
    """The official lab with the student's work in it, in format 4.5. Changes neither."""
    pairs = _pairs(mine, official)
    raw = json.loads(json.dumps({**official.raw, "cells": [], "nbformat": 4, "nbformat_minor": 5}))
    raw["metadata"] = {**mine.raw.get("metadata", {}), **raw.get("metadata", {})}
    merged, behind = Merged(raw), _added(mine, pairs)
    taken = {cell.id for cell in official.cells}
    for extra in behind.get(None, ()):
        _append_added(merged, extra, taken)
    for cell in official.cells:
        partner = pairs.get(cell.id)
        if partner is not None and _is_work(partner):
            raw["cells"].append(_with_text(cell, partner))
            merged.kept.append(partner.exercise or cell.id)
        else:
            raw["cells"].append(json.loads(json.dumps(cell.raw)))
            if partner is not None and partner.text == cell.text and "outputs" in partner.raw:
                raw["cells"][-1].update(outputs=partner.raw["outputs"], execution_count=partner.raw.get("execution_count"))
            elif partner is not None and partner.text != cell.text:
                merged.replaced.append(cell.id)
        for extra in behind.get(cell.id, ()):
            _append_added(merged, extra, taken)
    return merged


def _pairs(mine: Notebook, official: Notebook) -> dict[str, Cell]:
    """The student's cell for each cell of the lab that has one: by id, by exercise, by question; where ids are lost, by text.
    Of an exercise's several cells, the last with work in it."""
    pairs: dict[str, Cell] = {}
    for cell in official.cells:
        asked = _asked(cell)
        same = [
            other
            for other in mine.cells
            if (cell.exercise and other.exercise == cell.exercise)
            or (not cell.exercise and other.id == cell.id)
            or (not cell.exercise and not other.id and (_asked(other) == asked if asked else other.text == cell.text))
        ]
        if same:
            pairs[cell.id] = next((other for other in reversed(same) if _is_work(other)), same[0])
    return pairs


def _added(mine: Notebook, pairs: dict[str, Cell]) -> dict[str | None, list[Cell]]:
    """The student's other cells, under the id of the lab's cell they stand behind (None: in front of all)."""
    place = {id(cell.raw): name for name, cell in pairs.items()}
    found: dict[str | None, list[Cell]] = {}
    behind: str | None = None
    for cell in mine.cells:
        if id(cell.raw) in place:
            behind = place[id(cell.raw)]
        elif cell.text.strip() and not _is_blank(cell):
            found.setdefault(behind, []).append(cell)
    return found


def _is_work(cell: Cell) -> bool:
    """Whether a student wrote into it: an exercise that is not a stub, a question that is answered."""
    return bool(cell.exercise or _asked(cell)) and not _is_blank(cell)


def _is_blank(cell: Cell) -> bool:
    """A stub as it was, a question without an answer."""
    if cell.exercise:
        verdict = before_running(table()[cell.exercise], cell.text)
        return verdict is not None and verdict.category == "not attempted" and "still to be written" not in verdict.message
    asked = _calls(cell)
    return bool(asked) and all(call.answer is None or _is_open(call.answer) for call in asked)


def _is_open(answer: ast.expr) -> bool:
    return isinstance(answer, ast.Constant) and answer.value == OPEN


def _asked(cell: Cell) -> list[str]:
    """The questions of a cell."""
    return [call.question for call in _calls(cell)]


def _calls(cell: Cell) -> list[QuestionCall]:
    return question_calls(cell.text) if cell.kind == "code" else []


def _with_text(cell: Cell, mine: Cell) -> dict[str, Any]:
    """The lab's cell (its id and metadata) with the student's text and outputs. Also where it had become a text cell."""
    raw: dict[str, Any] = json.loads(json.dumps(cell.raw))
    raw["source"] = mine.text.splitlines(keepends=True)
    if mine.kind == "code":
        raw.update(outputs=mine.raw.get("outputs", []), execution_count=mine.raw.get("execution_count"))
    return raw


def _append_added(merged: Merged, cell: Cell, taken: set[str]) -> None:
    raw: dict[str, Any] = json.loads(json.dumps(cell.raw))
    name = cell.id if cell.id and cell.id not in taken else next(n for i in range(1, 10**6) if (n := f"mine-{i}") not in taken)
    taken.add(name)
    raw.update(id=name, source=cell.text.splitlines(keepends=True))
    merged.raw["cells"].append(raw)
    merged.added.append(name)


# ----------------------------------------------------------------------------------------------------------- the files


def official_labs(where: str) -> dict[str, Notebook]:
    """The labs by number, from a folder (another clone, or its labs/), else from a revision of this clone's git. Raises
    CheckFailed if there are none."""
    folder = Path(where).expanduser()
    found: Iterable[Notebook] = _in_folder(folder) if folder.is_dir() else _in_git(where)
    labs = {notebook.lab: notebook for notebook in found if notebook.lab and _kind(notebook) == "lab"}
    if not labs:
        raise CheckFailed(
            f"There are no labs in {where!r}. Give a folder with the new labs, or a git revision: --from origin/main"
        )
    return labs


def _kind(notebook: Notebook) -> str:
    return str(notebook.raw["metadata"]["minivllm"].get("kind"))


def _in_folder(folder: Path) -> Iterator[Notebook]:
    inner = folder / "labs"
    for path in sorted((inner if inner.is_dir() else folder).glob("*.ipynb")):
        yield read_notebook(path)


def _in_git(revision: str) -> Iterator[Notebook]:
    for name in _git("ls-tree", "--name-only", revision, "labs/").splitlines():
        if name.endswith(".ipynb"):
            yield parse_notebook(Path(name), _git("show", f"{revision}:{name}"))


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", b"") or b""
        reason = (said.decode("utf-8", "replace").strip().splitlines() or [str(error)])[-1]
        raise CheckFailed(f"The new labs could not be read from git ({reason}). Give their folder: --from FOLDER") from None
    return done.stdout.decode("utf-8")


def update(paths: Iterable[Path], official: dict[str, Notebook]) -> bool:
    """Merge each notebook with the official one of its lab, in place, and say what became of it. False if one could not be."""
    good = True
    for path in paths:
        try:
            mine = read_notebook(path)
        except Unreadable as error:
            print(f"{path}: skipped, {error}.")
            good = False
            continue
        if mine.lab not in official:
            print(f"{path}: skipped, " + (f"there is no new Lab {mine.lab}." if mine.lab else "its metadata names no lab."))
            good = good and mine.lab is None
            continue
        merged = merge(mine, official[mine.lab])
        if merged.raw == mine.raw:
            print(f"{path}: up to date.")
            continue
        with locked():
            backup = _back_up(path)
            write_atomically(path, json.dumps(merged.raw, indent=1, ensure_ascii=False) + "\n")
        _tell(path, merged, backup)
    return good


def _back_up(path: Path) -> Path:
    """A copy of the notebook as it is, complete before anything is changed."""
    backup = new_backup(path.stem, ".ipynb")
    write_atomically(backup, path.read_text(encoding="utf-8-sig"))
    return backup


def _tell(path: Path, merged: Merged, backup: Path) -> None:
    print(f"{path}: updated. If it is open, reload it from disk.")
    for what, names in (
        ("your answers, kept", merged.kept),
        ("cells that the new lab does not have, kept", merged.added),
        ("cells of the lab that differed and are the new ones now", merged.replaced),
    ):
        if names:
            print(f"  {what}: {', '.join(names)}")
    print(f"  as it was before: {backup}")


def main(paths: list[Path], where: str) -> int:
    """`python -m checks update`. Returns the exit status: 1 if a notebook could not be updated."""
    try:
        official = official_labs(where)
    except Unreadable as error:
        raise CheckFailed(f"A notebook in {where!r} cannot be read: {error}.") from None
    return 0 if update(paths or sorted((ROOT / "labs").glob("*.ipynb")), official) else 1
