"""The proof that the labs build the engine: made from the solution notebooks alone, with those functions of minivllm's removed,
it passes the parity tests.

A tree of its own is made: a copy of minivllm/ in which every function that a lab builds is the notebook's (in files that are
no component: rope, the decoder layer, naive and contiguous attention), or raises, and the notebook's part is plugged in as a
component. The parity tests run in that tree, in a process of its own, as they are.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from checks.exercises import has_checks, table
from checks.sandbox.cell import body_without_docstring, find_function, name_of
from checks.student.engine import components
from checks.student.home import read_progress
from checks.student.restore import restore

ROOT = Path(__file__).resolve().parents[2]
ROWS = [row for row in table().values() if has_checks(row.lab)]
CONFTEST = """
from pathlib import Path

from minivllm.components import Components

found = Components.from_dir(Path(__file__).parent / "my_engine")
mine = {{seam: found[seam] for seam in {seams}}}
original = Components.__init__


def with_mine(self, parts=None):
    original(self, {{**mine, **(parts or {{}})}})


Components.__init__ = with_mine


def pytest_sessionfinish():
    (Path(__file__).parent / "used").write_text(" ".join(sorted({{part.__module__ for part in mine.values()}})))
"""
PARITY = {
    # The labs' decode attention knows no sliding window, and the engine refuses it a model that has some.
    "tests/exactness": "every_family and not window and not mixed and not 2048",
    "tests/models/test_decoder.py": "full_forward_equals or lab_s_layer",
    "tests/models/test_rope.py": "",
    "tests/attention/test_contiguous.py": "",
    "tests/serving/test_async_llm.py": "own_stream or slow_reader or leaves_aborts or dropped_aborts or error_comes_after",
    # The tree's manager is minivllm's, and stands on the table code that was removed; parts of my_engine cannot be pickled.
    "tests/core/test_cases.py": "not radix and not pickled",
    "tests/spec_decode/test_same_tokens.py": "(greedy_in_every_shape or 200_prompts or inside_the_draft_window) and not radix",
}


@pytest.fixture
def restored(student: Path) -> Path:
    """A student's folder made from the solution notebooks, and from nothing else."""
    assert restore(sorted((ROOT / "solutions").glob("[0-9][0-9]_*.ipynb")))
    return student


def test_every_exercise_of_the_solution_notebooks_passes_and_is_in_my_engine(restored: Path) -> None:
    state = read_progress()["exercises"]
    assert {row.id: state.get(row.id, {}).get("status") for row in ROWS} == {row.id: "passed" for row in ROWS}
    files = {path.relative_to(restored / "my_engine").as_posix() for path in (restored / "my_engine").rglob("*.py")}
    assert files == {row.file for row in ROWS if row.file}
    assert set(components()) == {row.seam for row in ROWS if row.seam}


def make_tree(tree: Path, my_engine: Path) -> list[str]:
    """The copy without what the labs build. Returns the functions that were removed, or replaced by the notebooks'."""
    leave = shutil.ignore_patterns("__pycache__", "labs", "mistakes")
    shutil.copytree(ROOT / "minivllm", tree / "minivllm", ignore=leave)
    shutil.copytree(ROOT / "tests", tree / "tests", ignore=leave)
    shutil.copy(ROOT / "pyproject.toml", tree)
    shutil.copytree(my_engine, tree / "my_engine")
    for row in ROWS:
        if row.file and row.seam is None:
            shutil.copy(my_engine / row.file, tree / "minivllm" / row.file)
    gone = [(row.file, name_of(f)) for row in ROWS if row.file and row.seam for f in row.functions]
    for file, function in gone:
        _remove(tree / "minivllm" / str(file), function)
    seams = sorted({row.seam for row in ROWS if row.seam})
    (tree / "conftest.py").write_text(CONFTEST.format(seams=seams))
    return [function for _, function in gone]


def _remove(path: Path, function: str) -> None:
    """Its body raises from here on."""
    text = path.read_text(encoding="utf-8")
    found = find_function(ast.parse(text), function)
    assert found is not None, function
    body, lines = body_without_docstring(found), text.splitlines()
    raises = " " * body[0].col_offset + f'raise AssertionError("minivllm\'s own {function} was called")'
    lines[body[0].lineno - 1 : found.end_lineno] = [raises]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def in_tree(tree: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.slow
def test_the_engine_made_of_the_notebooks_passes_the_parity_tests(restored: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    gone = make_tree(tree, restored / "my_engine")
    assert {"BlockPool.allocate", "KVCacheManager.allocate_slots", "write_kv", "paged_decode", "apply_top_p"} <= set(gone)
    for tests, chosen in PARITY.items():
        select = ["-k", chosen] if chosen else []
        done = in_tree(tree, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *select, tests)
        assert done.returncode == 0, f"{tests}\n{done.stdout[-3000:]}"
        assert " passed" in done.stdout
    assert "my_engine" in (tree / "used").read_text()


@pytest.mark.slow
def test_without_the_notebooks_parts_that_tree_answers_nothing(restored: Path, tmp_path: Path) -> None:
    """The proof proves: what was removed is what the engine needs."""
    tree = tmp_path / "tree"
    make_tree(tree, restored / "my_engine")
    (tree / "conftest.py").unlink()
    done = in_tree(tree, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "llama and 2048", "tests/exactness")
    assert done.returncode == 1 and "minivllm's own" in done.stdout
