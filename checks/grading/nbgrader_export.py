"""python -m checks release --nbgrader --labs 00-07 --out DIR: the labs as a course of nbgrader.

    DIR/nbgrader_config.py                  time limits, experiments shrunk
    DIR/source/lab_04/04_paged_kv.ipynb     answers between `### BEGIN SOLUTION` and `### END SOLUTION`, the check below

From there it is nbgrader's: `nbgrader generate_assignment lab_04` makes the students' version, `nbgrader autograde lab_04`
grades. Students' and graders' Python must find `checks` and `minivllm`: the student folder, installed (`pip install -e .`).

nbgrader runs the whole notebook in one kernel, the student's code beside the checks' calls; what that cannot keep apart is said
in INSTRUCTORS.md. Points are the same as everywhere; a question counts when it is answered.
"""

# mypy: allow-untyped-calls, no-warn-return-any
# (nbformat has no type annotations)

from __future__ import annotations

import ast
import textwrap
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from checks.authoring.build import GET_READY, build
from checks.authoring.source import Cell, Source, SourceError, with_answers
from checks.grading.release import refuse_full
from checks.grading.worth import quiz_questions, worth_of
from checks.sandbox.cell import own_source

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
_READY = "\n\nfrom checks.student.apart import ready_to_grade\n\nready_to_grade()"
CONFIG = """\
# nbgrader's configuration for these labs. Run nbgrader in this folder.
import os

os.environ.setdefault("MINIVLLM_FAST", "1")  # experiments shrink to seconds while notebooks are graded

c = get_config()  # noqa: F821 (nbgrader defines it)
c.CourseDirectory.course_id = "minivllm"
c.ExecutePreprocessor.timeout = 300  # seconds a cell may take
c.ExecutePreprocessor.allow_errors = True  # the cells below a wrong answer are run too
c.ClearSolutions.code_stub = {"python": "# YOUR CODE HERE\\nraise NotImplementedError()"}
"""


def export(labs: list[Source], out: Path) -> None:
    """Write the course's folder. Raises ValueError if `out` is not empty."""
    refuse_full(out)
    for source in labs:
        path = out / "source" / f"lab_{source.lab}" / f"{source.name}.ipynb"
        path.parent.mkdir(parents=True)
        nbformat.write(notebook(source), path)
    (out / "nbgrader_config.py").write_text(CONFIG, encoding="utf-8", newline="\n")


def notebook(source: Source) -> NotebookNode:
    """The instructor's notebook of a lab: the lab, with answers marked, and each check in a cell below its answer."""
    points, lab = worth_of(source), build(source)[1]
    cells: list[NotebookNode] = []
    written = {cell.id: cell for cell in source.cells}
    for node in lab.cells:
        cell = written.get(node.id)
        if cell is not None and cell.exercise:
            cells += [_answer(node, marked(cell, source.path.name)), _check(cell.exercise, points[cell.exercise])]
        elif cell is not None and (asked := quiz_questions(cell)):
            if len(asked) != 1:
                raise SourceError(f"{source.path.name}:{cell.line}: nbgrader needs one question a cell, and {asked} share one")
            cells += [_answer(node, _marked_reply(cell, asked[0])), _answered(asked[0], points[asked[0]])]
        else:
            cells.append(_given(node, locked=node.id == GET_READY))
    made = nbformat.v4.new_notebook(cells=cells, metadata=lab.metadata)
    made.nbformat_minor = 5
    nbformat.validate(made)
    return made


def marked(cell: Cell, where: str) -> str:
    """An exercise's cell with its answers between nbgrader's marks, without its call of check."""
    answered, text = with_answers(_with_marks(cell.text), f"{where}:{cell.line}"), []
    for line in own_source(answered).splitlines():
        if line.strip() in ("pass  # begin", "pass  # end"):
            text.append(line.replace("pass  # begin", BEGIN).replace("pass  # end", END))
        else:
            text.append(line)
    return "\n".join(text)


def _with_marks(text: str) -> str:
    """Statements that hold the places of nbgrader's marks, around whatever the builder will fill in."""
    out: list[str] = []
    for line in text.splitlines():
        indent, words = line[: len(line) - len(line.lstrip())], line.strip()
        if words.startswith("# solution: "):
            out += [f"{indent}pass  # begin", line, f"{indent}pass  # end"]
        elif words == "# BEGIN SOLUTION":
            out += [f"{indent}pass  # begin", line]
        elif words == "# END SOLUTION":
            out += [line, f"{indent}pass  # end"]
        else:
            out.append(line)
    return "\n".join(out)


def _marked_reply(cell: Cell, question: str) -> str:
    """A question's cell: the answer in a variable, so that the marks stand on lines of their own."""
    call = next(
        node.value for node in ast.parse(cell.text).body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    )
    answer = ast.get_source_segment(cell.text, call.args[1]) or ""
    text = textwrap.dedent(f"""\
        # Your answer goes into a variable: answer = "a", or a number, or a formula.
        {BEGIN}
        answer = ...
        {END}
        quiz("{question}", answer)""")
    return text.replace("...", answer, 1)


# ------------------------------------------------------------------------------------------------------------ the cells


def _answer(node: NotebookNode, text: str) -> NotebookNode:
    return _cell(text, node.id, {**node.metadata, "deletable": False}, solution=True)


def _check(exercise: str, points: float) -> NotebookNode:
    name = f"check-{exercise.replace('.', '-')}"
    text = f'from checks.student.apart import check_answer\n\ncheck_answer("{exercise}")'
    return _cell(text, name, {"deletable": False, "editable": False}, grade=True, points=points)


def _answered(question: str, points: float) -> NotebookNode:
    name = f"answered-{question.replace('.', '-')}"
    text = f'from checks.student.apart import answered\n\nanswered("{question}")'
    return _cell(text, name, {"deletable": False, "editable": False}, grade=True, points=points)


def _given(node: NotebookNode, *, locked: bool) -> NotebookNode:
    """A cell of the lab as it is; its first code cell cannot be changed, and gives each graded notebook a folder of its own."""
    if not locked:
        return node
    return _cell(node.source + _READY, node.id, {"deletable": False, "editable": False})


def _cell(
    text: str, name: str, metadata: dict[str, Any], *, solution: bool = False, grade: bool = False, points: float = 0.0
) -> NotebookNode:
    told: dict[str, Any] = {
        "schema_version": 3, "grade_id": name, "grade": grade, "solution": solution, "locked": not solution, "task": False,
    }  # fmt: skip
    if grade:
        told["points"] = points
    return nbformat.v4.new_code_cell(text, id=name, metadata={**metadata, "nbgrader": told})
