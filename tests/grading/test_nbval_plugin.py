"""pytest --nbval-lax -p checks.nbval_plugin: the points of one notebook, in pytest's summary; and nbval in a grading run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from checks.grading.nbval_run import run_cells
from checks.grading.one import Task
from checks.grading.points import Grader
from checks.grading.submissions import Found
from checks.grading.trees import Trees
from tests.grading import mangled

ROOT = Path(__file__).resolve().parents[2]


def test_the_summary_has_the_points_whatever_the_notebook_says_of_itself(tmp_path: Path) -> None:
    raw = mangled.solved()
    raw["cells"] = [c for c in raw["cells"] if c["id"] in ("exercise-4-3", "exercise-4-4")]
    mangled.cell_of(raw, "4.4")["source"] = "# NBVAL_SKIP\nprint('passed, honestly')"
    (tmp_path / "a b.ipynb").write_text(json.dumps(raw), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--nbval-lax",
        "-p",
        "checks.nbval_plugin",
        "-p",
        "no:cacheprovider",
        "a b.ipynb",
    ]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, env=environment)
    assert "points of a b.ipynb" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert "4.3        1 of 1  passed" in done.stdout
    assert "skip tag: 4.4 (NBVAL_SKIP)" in done.stdout
    assert "Lab 04: 1 of 12 points" in done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2")
def test_the_rebuilt_notebook_runs_behind_the_same_walls(tmp_path: Path) -> None:
    data = (ROOT / "solutions" / "02_naive_generation.ipynb").read_bytes()
    task = Task(Found("alice", "x.ipynb", "", data, len(data)), "02", "namespaces")
    cells = run_cells(Grader(Trees(tmp_path), ""), task)
    assert len(cells) > 10
    assert {cell.status for cell in cells} == {"passed"}, [c for c in cells if c.status != "passed"]
    assert {cell.exercise for cell in cells} >= {"2.1", "2.2", "2.3"}
