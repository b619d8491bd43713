"""Makes a lab's two notebooks from its source, runs the solution, and says when a built file is stale.

What is compared for staleness is what the source decides: cells, ids, metadata. Outputs and execution counts are not, since
they hold timings; nor is anything a library's version could change.
"""

# mypy: allow-untyped-calls, no-warn-return-any
# (nbformat has no type annotations)

from __future__ import annotations

import ast
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from checks.authoring.source import (
    LABS,
    ROOT,
    SOLUTIONS,
    Cell,
    Source,
    SourceError,
    read_source,
    sources,
    with_answers,
    with_stubs,
)
from checks.authoring.validate import problems_of
from checks.cloud import first_cell
from checks.exercises import check_of, find
from checks.student.calls import question_calls
from checks.student.home import write_atomically
from checks.student.quiz import OPEN, as_markdown, find_question

GET_READY = "get-ready"  # the id of the cell that every lab gets in front of its first code
_PLACEHOLDER = re.compile(r"\{\{(\w+)(?: ([\w.]+))?\}\}")


def build(source: Source) -> tuple[NotebookNode, NotebookNode]:
    """(solution, lab), without outputs. Raises SourceError for what cannot be built at all."""
    return _notebook(source, "solution"), _notebook(source, "lab")


def targets(source: Source) -> tuple[Path, Path]:
    return SOLUTIONS / f"{source.name}.ipynb", LABS / f"{source.name}.ipynb"


def _notebook(source: Source, kind: str) -> NotebookNode:
    cells = [_cell(source, cell, kind) for cell in source.cells]
    first_code = next((i for i, cell in enumerate(cells) if cell.cell_type == "code"), len(cells))
    cells.insert(first_code, nbformat.v4.new_code_cell(first_cell(), id=GET_READY))
    metadata = {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "minivllm": {"lab": source.lab, "kind": kind, "version": str(source.header["version"])},
    }
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
    notebook.nbformat_minor = 5
    nbformat.validate(notebook)
    return notebook


def _cell(source: Source, cell: Cell, kind: str) -> NotebookNode:
    where = f"{source.path.name}:{cell.line}"
    metadata: dict[str, Any] = {}
    if cell.kind == "markdown":
        return nbformat.v4.new_markdown_cell(_filled_in(source, cell.text, where), id=cell.id, metadata=metadata)
    if cell.kind != "code":
        raise SourceError(f"{where}: a cell is code or [markdown], not [{cell.kind}]")
    if cell.exercise:
        metadata["minivllm"] = {"exercise": cell.exercise}
        metadata["deletable"] = False
    elif answered := [call.question for call in question_calls(cell.text)]:
        metadata["minivllm"] = {"questions": answered}
    if kind == "solution":
        if cell.tags:
            metadata["tags"] = cell.tags
        return nbformat.v4.new_code_cell(with_answers(cell.text, where), id=cell.id, metadata=metadata)
    text = with_stubs(cell.text, cell.exercise or "", where)
    return nbformat.v4.new_code_cell(_without_question_answers(text), id=cell.id, metadata=metadata)


def _without_question_answers(text: str) -> str:
    lines = text.splitlines()
    for call in reversed(question_calls(text)):
        first, last = call.lines
        lines[first - 1 : last] = [f'{call.verb}("{call.question}", "{OPEN}")']
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------- text filled in


def _filled_in(source: Source, text: str, where: str) -> str:
    """Markdown with {{box}}, {{exercise 2.1}}, {{question 2.q1}} replaced by what the data says."""

    def fill(match: re.Match[str]) -> str:
        what, name = match[1], match[2] or ""
        if what == "box":
            return _box(source.header)
        if what == "exercise":
            return _exercise_line(name)
        if what == "question":
            return as_markdown(find_question(name))
        raise SourceError(f"{where}: {match[0]} is not box, exercise or question")

    try:
        return _PLACEHOLDER.sub(fill, text)
    except (KeyError, ValueError) as error:
        raise SourceError(f"{where}: {error}") from error


def _box(header: dict[str, Any]) -> str:
    rows = [(name, header[key]) for name, key in _BOX.items()]
    return "| | |\n|---|---|\n" + "\n".join(f"| **{name}** | {value} |" for name, value in rows)


_BOX = {
    "GPU needed?": "gpu",
    "Time": "time",
    "Download": "download",
    "Before this": "prerequisites",
    "In the course": "required",
}


def _exercise_line(exercise: str) -> str:
    check = check_of(find(exercise))
    filled, empty = "●" * check.difficulty, "○" * (3 - check.difficulty)
    return (
        f"*About {check.minutes} minutes · difficulty {filled}{empty} ({check.difficulty} of 3) ·"
        f' {len(check.hints)} hints, one at a time: `hint("{exercise}")`*'
    )


# ---------------------------------------------------------------------------------------------------------- the files


def write(source: Source, *, execute: bool) -> list[Path]:
    """Build and write both notebooks; outputs of cells whose code did not change are kept. Raises SourceError naming what a lab
    lacks."""
    solution, lab = build(source)
    if problems := problems_of(source, solution, lab):
        raise SourceError("\n".join(problems))
    solution_path, lab_path = targets(source)
    if execute:
        solution = run(solution)
        if problems := output_problems(solution):
            raise SourceError("\n".join(f"{solution_path.name}: {p}" for p in problems))
    else:
        keep_outputs(solution, solution_path)
    for notebook, path in ((solution, solution_path), (lab, lab_path)):
        write_atomically(path, nbformat.writes(notebook) + "\n")
    return [solution_path, lab_path]


def run(notebook: NotebookNode) -> NotebookNode:
    """The notebook with outputs, run from its top in a fresh kernel and a fresh student's folder."""
    from nbclient import NotebookClient

    with tempfile.TemporaryDirectory() as fresh:
        environment = {**os.environ, "MINIVLLM_HOME": fresh, "PYTHONPATH": str(ROOT)}
        client = NotebookClient(
            notebook,
            timeout=900,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(SOLUTIONS)}},
        )
        client.execute(env=environment)
    notebook.metadata.language_info = {"name": "python"}
    notebook.metadata.pop("widgets", None)
    return notebook


def output_problems(notebook: NotebookNode) -> list[str]:
    """What may not stand in outputs: paths of the machine that ran them, pictures without a text."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            text = json.dumps({k: v for k, v in output.items() if k != "data"}) + json.dumps(
                {k: v for k, v in output.get("data", {}).items() if not k.startswith("image/")}
            )
            found += [f"cell {cell.id}: its output names a path of this machine, {p}" for p in _own_paths() if p in text]
            if "image/png" in output.get("data", {}) and not output.metadata.get("image/png", {}).get("alt"):
                found.append(f"cell {cell.id}: a picture without alternative text; display it with show(figure, alt=...)")
    return found


def _own_paths() -> set[str]:
    return {p for p in (str(ROOT), str(Path.home()), tempfile.gettempdir()) if len(p) > 2}


def keep_outputs(notebook: NotebookNode, path: Path) -> None:
    """Take the outputs of cells whose code did not change (comments may) over from the file that is there."""
    if not path.is_file():
        return
    before = {cell.get("id"): cell for cell in nbformat.read(path, as_version=4).cells}
    for cell in notebook.cells:
        old = before.get(cell.id)
        if cell.cell_type == "code" and old is not None and _same_code(old.get("source", ""), cell.source):
            cell.outputs, cell.execution_count = old.get("outputs", []), old.get("execution_count")


def _same_code(old: str, new: str) -> bool:
    try:
        return old == new or ast.dump(ast.parse(old)) == ast.dump(ast.parse(new))
    except SyntaxError:  # a line of IPython's
        return False


def stale(source: Source) -> list[str]:
    """What is wrong with a lab's built files: one line each, beginning with the file's name."""
    try:
        solution, lab = build(source)
    except SourceError as error:
        return [str(error)]
    found = problems_of(source, solution, lab)
    for notebook, path in zip((solution, lab), targets(source), strict=True):
        name = f"{path.parent.name}/{path.name}"
        if not path.is_file():
            found.append(f"{name} is missing. Run python -m checks build.")
            continue
        try:
            there = nbformat.reads(path.read_text(encoding="utf-8"), as_version=nbformat.NO_CONVERT)
        except Exception as error:
            found.append(f"{name} cannot be read: {error}")
            continue
        if difference := _difference(_essence(notebook), _essence(there)):
            found.append(f"{name} is stale ({difference}). Run python -m checks build.")
        found += [f"{name}: {problem}" for problem in output_problems(there)]
        if path.stat().st_size > 1 << 20:
            found.append(f"{name} is over 1 MiB")
    return found


def _essence(notebook: NotebookNode) -> dict[str, Any]:
    """What the source decides about a notebook."""
    cells = [
        {"id": c.get("id"), "type": c.cell_type, "text": c.source, "metadata": json.loads(json.dumps(c.metadata))}
        for c in notebook.cells
    ]
    return {
        "format": [notebook.nbformat, notebook.nbformat_minor],
        "metadata": json.loads(json.dumps(notebook.metadata)),
        "cells": cells,
    }


def _difference(wanted: dict[str, Any], there: dict[str, Any]) -> str | None:
    """The first difference, in words."""
    for key in ("format", "metadata"):
        if wanted[key] != there[key]:
            return f"its {key} is {there[key]}"
    for new, old in zip(wanted["cells"], there["cells"], strict=False):
        if new != old:
            return f"cell {new['id']} differs"
    if len(wanted["cells"]) != len(there["cells"]):
        return f"it has {len(there['cells'])} cells, not {len(wanted['cells'])}"
    return None


def main(labs: list[str], *, check: bool, execute: bool) -> int:
    """`python -m checks build`. Returns the exit status."""
    wanted = [path for path in sources() if not labs or path.stem[:2] in [lab.zfill(2) for lab in labs]]
    if not wanted:
        print(f"No lab sources for {', '.join(labs) or 'any lab'} in {SOLUTIONS.name}/.")
        return 1
    status = 0
    for path in wanted:
        try:
            source = read_source(path)
            problems = stale(source) if check else []
            written = [] if check else write(source, execute=execute)
        except SourceError as error:
            problems, written = str(error).splitlines(), []
        for problem in problems:
            print(problem)
            status = 1
        for file in written:
            print(f"wrote {file.parent.name}/{file.name}")
        if check and not problems:
            print(f"{path.stem}: solution and lab are up to date")
    return status
