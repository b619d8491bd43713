"""What an instructor relies on: nbval passes a solved notebook, and only that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
SOLUTIONS = sorted((ROOT / "solutions").glob("[0-9][0-9]_*.ipynb"))
LABS = sorted((ROOT / "labs").glob("[0-9][0-9]_*.ipynb"))
pytestmark = pytest.mark.usefixtures("smollm2")
Nbval = Callable[..., "CompletedProcess[str]"]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", SOLUTIONS, ids=lambda p: p.stem)
def test_a_solution_passes(nbval: Nbval, notebook: Path) -> None:
    result = nbval(notebook, MINIVLLM_FAST="1")
    assert result.returncode == 0, result.stdout[-3000:]


@pytest.mark.parametrize("notebook", LABS, ids=lambda p: p.stem)
def test_an_untouched_lab_fails(nbval: Nbval, notebook: Path) -> None:
    result = nbval(notebook, "-x", MINIVLLM_FAST="1")
    assert result.returncode == 1
    assert "Not attempted yet" in result.stdout


def test_a_solution_without_its_set_up_cell_fails(nbval: Nbval, tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "solutions" / "02_naive_generation.ipynb", as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell.id != "setup"]
    path = tmp_path / "without_setup.ipynb"
    nbformat.write(notebook, path)
    result = nbval(path, "-x", MINIVLLM_FAST="1")
    assert result.returncode == 1 and "NameError" in result.stdout


def test_one_unsolved_exercise_is_enough_to_fail(nbval: Nbval, tmp_path: Path) -> None:
    solution = nbformat.read(ROOT / "solutions" / "02_naive_generation.ipynb", as_version=4)
    lab = {cell.id: cell for cell in nbformat.read(ROOT / "labs" / "02_naive_generation.ipynb", as_version=4).cells}
    solution.cells = [lab["exercise-2-3"] if cell.id == "exercise-2-3" else cell for cell in solution.cells]
    solution.cells = [cell for cell in solution.cells if cell.id.startswith("exercise")]
    path = tmp_path / "nearly.ipynb"
    nbformat.write(solution, path)
    result = nbval(path)
    assert result.returncode == 1 and "1 failed" in result.stdout and "Exercise 2.3" in result.stdout
