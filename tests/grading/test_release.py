"""The student folder: what is in it, what is not, and that it works by itself."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml

from checks.authoring.source import ROOT, SourceError, read_source, with_answers
from checks.exercises import find
from checks.grading import release as module
from checks.grading.release import errata_of, manifest, parse_labs, readme, release
from checks.grading.worth import worth, worth_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("released") / "labs to hand out"
    release(parse_labs("00-04"), out)
    return out


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_it_has_the_labs_asked_for_and_nothing_of_the_instructors(folder: Path) -> None:
    files = _files(folder)
    assert sorted(f for f in files if f.endswith(".ipynb")) == [f"labs/{s.name}.ipynb" for s in parse_labs("00-04")]
    forbidden = (
        "solutions/",
        "tests/",
        "checks/grading",
        "checks/authoring/build",
        "checks/authoring/validate",
        "labs/results",
    )
    assert not [f for f in files if f.startswith(forbidden) or "__pycache__" in f or "/." in f]
    assert not [f for f in files if "lab_05" in f or f.endswith("quizzes/05.yaml")]
    assert {"README.md", "Makefile", "LICENSE", "pyproject.toml", "labs/README.md", "labs/AGENTS.md"} <= files


def test_its_notebooks_have_stubs(folder: Path) -> None:
    for path in (folder / "labs").glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        exercises = [c for c in notebook.cells if c.metadata.get("minivllm", {}).get("exercise")]
        assert exercises and all("raise NotImplementedError" in c.source for c in exercises)
        assert all(not c.get("outputs") for c in notebook.cells)


def test_every_module_it_imports_is_in_it(folder: Path) -> None:
    missing = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            for name in names:
                target = folder / name.replace(".", "/")
                inside = name.partition(".")[0] in ("checks", "minivllm")
                if inside and not target.with_suffix(".py").is_file() and not (target / "__init__.py").is_file():
                    missing.append((path.name, name))
    allowed = {("__main__.py", "checks.authoring.build"), ("__main__.py", "checks.grading.release")}
    assert {m for m in missing if not m[1].startswith("checks.grading.")} <= allowed


def test_a_check_passes_there_and_an_answer_that_is_not_there_is_said_so(folder: Path, tmp_path: Path) -> None:
    """Run from the folder alone: this clone is not on its path."""
    copy = tmp_path / "course"
    shutil.copytree(folder, copy)
    cells = read_source(next((ROOT / "solutions").glob("04_*.py"))).cells
    answer = next(c for c in cells if c.exercise == "4.3")
    path = next((copy / "labs").glob("04_*.ipynb"))
    notebook = nbformat.read(path, as_version=4)
    next(c for c in notebook.cells if c.id == answer.id).source = with_answers(answer.text)
    nbformat.write(notebook, path)
    assert "4.3   passed" in _run(copy, "restore", str(path))
    assert "4.3" in _run(copy, "status")
    said = _run(copy, "release", "--out", "x", status=2)
    assert "for instructors" in said
    code = "from checks import solution; solution('2.1')"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, env=_environment(copy), capture_output=True, text=True)
    assert "not part of what you were given" in done.stderr


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(folder), "MINIVLLM_HOME": str(folder / "labs"), "OMP_NUM_THREADS": "1"}


def _run(folder: Path, *arguments: str, status: int = 0) -> str:
    command = [sys.executable, "-m", "checks", *arguments]
    done = subprocess.run(command, cwd=folder, env=_environment(folder), capture_output=True, text=True, timeout=200)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_what_it_says_of_the_answers_in_it_is_true(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert module.main("02-04", str(out), nbgrader=False, with_answers=False) == 0
    said = capsys.readouterr().out
    for place in re.findall(r"in ((?:minivllm|checks)/[a-z/]*)", said):
        assert list((out / place).rglob("*.*"))
    assert "answer: c" in (out / "checks" / "quizzes" / "04.yaml").read_text(encoding="utf-8") and "checks/quizzes/" in said
    assert "hints" in said and "hints=(" in (out / "checks" / "exercises" / "lab_04.py").read_text(encoding="utf-8")
    absent = re.search(r"Not in it are the answers to (.*)\.$", said.strip())
    assert absent and absent[1].split(", ") == ["2.1", "3.2", "3.3"]
    for exercise in absent[1].split(", "):
        name = find(exercise).functions[0].partition("(")[0]
        trees = [ast.parse(path.read_text(encoding="utf-8")) for path in out.rglob("*.py")]
        assert not [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_its_makefile_knows_its_targets(folder: Path) -> None:
    done = subprocess.run(["make", "-n", "lab"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and "checks/install.py --venv .venv --extras labs,serve" in done.stdout


def test_readme_and_manifest_tell_versions_and_points(folder: Path) -> None:
    told = json.loads((folder / "release.json").read_text(encoding="utf-8"))
    assert told["04"]["points"] == worth("04") and told["04"]["version"] == "1"
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "04_paged_kv.ipynb" in text and "4.5: 3" in text and "None so far" in text


def test_links_to_labs_that_are_not_handed_out_are_plain_text(folder: Path) -> None:
    text = (folder / "labs" / "README.md").read_text(encoding="utf-8")
    assert "(04_paged_kv.ipynb)" in text and "05_continuous_batching.ipynb" not in text and "05 Continuous batching" in text
    assert "Labs without a link come later." in text


def test_with_answers_solutions_are_in_it(tmp_path: Path) -> None:
    release(parse_labs("2"), tmp_path / "out", with_answers=True)
    assert (tmp_path / "out" / "solutions" / "02_naive_generation.py").is_file()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="not an empty folder"):
        release(parse_labs("00"), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("wrong", ["4.2", "x", "", "07-04", "99"])
def test_labs_that_cannot_be_meant_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"--labs takes|no Lab"):
        parse_labs(wrong or ",")


# ------------------------------------------------------------------------------------------------- points and errata


def test_points_stand_in_the_source_and_optional_exercises_count_nothing(tmp_path: Path) -> None:
    path = next((ROOT / "solutions").glob("07_*.py"))
    assert worth("07")["7.4"] == 0
    copy = tmp_path / path.name
    text = path.read_text(encoding="utf-8").replace('# %% id="exercise-7-1"', '# %% id="exercise-7-1" points=2.5')
    copy.write_text(text, encoding="utf-8")
    assert worth_of(read_source(copy)) == {**worth("07"), "7.1": 2.5}


def test_points_where_nothing_is_asked_are_refused() -> None:
    source = read_source(next((ROOT / "solutions").glob("02_*.py")))
    next(c for c in source.cells if c.id == "setup" or (c.kind == "code" and not c.exercise)).points = 1
    with pytest.raises(SourceError, match="points= belongs"):
        worth_of(source)


def test_each_version_after_the_first_says_what_it_corrects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ERRATA", tmp_path / "errata.yaml")
    source = read_source(next((ROOT / "solutions").glob("04_*.py")))
    source.header["version"] = 2
    with pytest.raises(SourceError, match="Each version from 2 to 2 needs an entry"):
        errata_of([source])
    rows = [{"lab": "04", "version": 2, "what": "slot_mapping takes lists too.", "exercises": ["4.3"]}]
    (tmp_path / "errata.yaml").write_text(yaml.safe_dump(rows))
    errata = errata_of([source])
    assert manifest([source], errata)["04"]["errata"][0]["exercises"] == ["4.3"]
    assert "- Lab 04, version 2 (exercise 4.3): slot_mapping takes lists too." in readme([source], errata)


def test_the_errata_of_this_clone_fit_its_labs() -> None:
    errata_of(parse_labs(None))
