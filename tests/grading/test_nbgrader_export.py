"""release --nbgrader: what nbgrader itself says of it. Skipped where nbgrader is not installed (pip install nbgrader)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from checks.authoring.source import ROOT, Cell, Source, read_source
from checks.grading.nbgrader_export import BEGIN, END, export, notebook
from checks.grading.release import parse_labs
from checks.grading.worth import worth_of
from checks.student.apart import quiet_stderr

HAS_NBGRADER = importlib.util.find_spec("nbgrader") is not None
needs_nbgrader = pytest.mark.skipif(not HAS_NBGRADER, reason="nbgrader is not installed: pip install nbgrader")
LAB_00 = read_source(next((ROOT / "solutions").glob("00_*.py")))
NAME = f"lab_00/{LAB_00.name}.ipynb"
SETUP = """\
from checks import quiz
import sys

print("a warning of some library", file=sys.stderr)"""


def small_lab() -> Source:
    """Lab 00 with one exercise and one question, and a set-up that needs no model."""
    kept = [cell for cell in LAB_00.cells if cell.id in ("title", "exercise-0-0", "quiz-0-q1")]
    return Source(LAB_00.path, LAB_00.header, [kept[0], Cell("code", "setup", SETUP, 1), *kept[1:]])


@pytest.mark.parametrize("source", parse_labs(None), ids=lambda s: s.name)
def test_every_answer_has_its_check_in_a_cell_below(source: Source) -> None:
    made = notebook(source)
    graded = {c.metadata.nbgrader.grade_id: c.metadata.nbgrader.points for c in made.cells if _told(c, "grade")}
    names = {
        f"check-{i.replace('.', '-')}" if "q" not in i else f"answered-{i.replace('.', '-')}": p
        for i, p in worth_of(source).items()
    }
    assert graded == names
    for answer in (c for c in made.cells if _told(c, "solution")):
        assert answer.source.count(BEGIN) == answer.source.count(END) >= 1
        assert (
            "check(" not in answer.source
            and "# solution:" not in answer.source
            and "# BEGIN" not in answer.source.replace(BEGIN, "")
        )
        compile(answer.source, answer.id, "exec")


def test_nothing_written_to_stderr_in_a_check_gets_out(capfd: pytest.CaptureFixture[str]) -> None:
    with quiet_stderr():
        print("from Python", file=sys.stderr)
        os.write(2, b"from a library in C\n")
    print("afterwards", file=sys.stderr)
    assert capfd.readouterr().err == "afterwards\n"


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course whose assignment lab_00 has been generated, with two students who handed something in."""
    folder = tmp_path_factory.mktemp("course") / "minivllm"
    export([small_lab()], folder)
    _nbgrader(folder, "generate_assignment", "lab_00")
    stub = nbformat.read(folder / "release" / NAME, as_version=4)
    right = {cell.id: cell.source for cell in nbformat.read(folder / "source" / NAME, as_version=4).cells}
    for student, wrong in (("good", ""), ("half", "return x + 1")):
        handed_in = nbformat.from_dict(stub)
        for cell in handed_in.cells:
            if _told(cell, "solution"):
                cell.source = cell.source.replace("raise NotImplementedError()", wrong) if wrong else right[cell.id]
                cell.source = cell.source.replace("return x + 1\nquiz", 'answer = "a"\nquiz')
        path = folder / "submitted" / student / NAME
        path.parent.mkdir(parents=True)
        nbformat.write(handed_in, path)
    return folder


@needs_nbgrader
def test_the_students_version_has_stubs_and_no_answers(course: Path) -> None:
    text = (course / "release" / NAME).read_text(encoding="utf-8")
    assert text.count("YOUR CODE HERE") == 2 and "SOLUTION" not in text and "return" not in text


@needs_nbgrader
def test_nbgrader_validates_the_answers(course: Path) -> None:
    assert "Success" in _nbgrader(course, "validate", f"source/{NAME}")


@needs_nbgrader
def test_autograde_gives_the_points_of_the_lab(course: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind a set-up that writes to stderr; and what one student passed, the next has not."""
    from nbgrader.api import Gradebook

    _nbgrader(course, "autograde", "lab_00")
    monkeypatch.setenv("PATH", _programs())
    with Gradebook(f"sqlite:///{course}/gradebook.db") as book:
        found = {s.student.id: (s.score, s.max_score) for s in book.assignment_submissions("lab_00")}
    assert found == {"good": (1.5, 1.5), "half": (0.5, 1.5)}


def _told(cell: NotebookNode, key: str) -> bool:
    return bool(cell.metadata.get("nbgrader", {}).get(key))


def _programs() -> str:
    """A PATH on which nbgrader finds `alembic`, which it starts."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def _nbgrader(folder: Path, *arguments: str) -> str:
    """What `nbgrader ...` prints, run in a course's folder."""
    if not HAS_NBGRADER:
        pytest.skip("nbgrader is not installed: pip install nbgrader")
    modules = os.pathsep.join(p for p in (str(ROOT), *sys.path) if p)
    done = subprocess.run(
        [sys.executable, "-m", "nbgrader", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": modules, "PATH": _programs(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr
