"""Whose a file is, what lab it is, and what of it is graded."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from checks.grading.one import official, read
from checks.grading.rebuild import rebuild
from checks.grading.submissions import find_submissions, guess_lab, recognize, whose
from checks.student.ipynb import Notebook, Unreadable, parse_notebook
from tests.grading import mangled


@pytest.mark.parametrize(
    ("name", "student"),
    [
        ("alice/04_paged_kv.ipynb", "alice"),
        ("submitted/alice/lab04/04_paged_kv.ipynb", "alice"),
        ("alice.ipynb", "alice"),
        ("alice_04_paged_kv.ipynb", "alice"),
        ("alice_04_paged_kv-Copy1.ipynb", "alice"),
        ("alice/notebooks/04_paged_kv.ipynb", "alice"),
        ("doejane_4711_998877_04_paged_kv.ipynb", "doejane_4711"),
        ("doejane_LATE_4711_998877_04_paged_kv-1.ipynb", "doejane_4711"),
        ("doejane_4711_998877_work/notebooks/04_paged_kv.ipynb", "doejane_4711"),
        ("Jane Doe_4711_assignsubmission_file_/04_paged_kv.ipynb", "Jane Doe_4711"),
        ("Jane Doe_4711_assignsubmission_file_04_paged_kv.ipynb", "Jane Doe_4711"),
        ("Lab 4_jdoe_attempt_2026-11-30-14-05-09_04_paged_kv.ipynb", "jdoe"),
        ("jane-doe_4711_2026-11-30_14-05-09.ipynb", "jane-doe_4711"),
        ("jane-doe_4711_20261130140509.ipynb", "jane-doe_4711"),
        ("Günther Ö/labor.ipynb", "Günther Ö"),
    ],
)
def test_whose_a_file_is(name: str, student: str) -> None:
    assert whose(PurePosixPath(name))[0] == student


def test_the_lab_is_told_by_the_notebook_and_not_by_its_name() -> None:
    raw = mangled.solved()
    assert recognize(parsed(raw)) == "04"
    del raw["metadata"]["minivllm"]
    assert recognize(parsed(raw)) == "04"
    assert recognize(parsed({**raw, "cells": []})) is None


def test_only_a_file_that_cannot_be_read_is_told_by_its_name() -> None:
    slugs = {"04": "04_paged_kv", "05": "05_continuous_batching"}
    assert guess_lab("doe_1_2_04_Paged_KV (1).ipynb", slugs) == "04"
    assert guess_lab("final.ipynb", slugs) is None


def test_zips_in_zips_are_read_and_bombs_are_not(tmp_path: Path) -> None:
    inner = tmp_path / "inner.zip"
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("04_paged_kv.ipynb", json.dumps(mangled.solved()))
        archive.writestr("bomb.ipynb", b"0" * (60 << 20))
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.write(inner, "doejane_4711_99_inner.zip")
        archive.writestr("roe_4712_98_04_paged_kv.ipynb", "{}")
    inner.unlink()
    found = find_submissions(tmp_path / "all.zip")
    assert [(f.student, f.data is None) for f in found] == [
        ("doejane_4711", False),
        ("doejane_4711", True),
        ("roe_4712", False),
    ]


def test_a_zip_too_deep_in_zips_is_told_so(tmp_path: Path) -> None:
    data = b"{}"
    for name in ("a.ipynb", "one.zip", "two.zip", "three.zip"):
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr(name, data)
        data = packed.getvalue()
    (tmp_path / "all.zip").write_bytes(data)
    (found,) = find_submissions(tmp_path / "all.zip")
    with pytest.raises(Unreadable, match=r"a zip in a zip, too deep: 3 in each other are opened; hand in the notebook itself"):
        read(found)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no_such"):
        find_submissions(tmp_path / "no_such")


# --------------------------------------------------------------------------------------------------------- rebuilding


def parsed(raw: dict) -> Notebook:  # type: ignore[type-arg]
    return parse_notebook(Path("x.ipynb"), json.dumps(raw))


def test_all_but_exercises_and_answers_is_the_official_lab() -> None:
    raw = mangled.lab({"4.3": mangled.answer(mangled.RIGHT["4.3"])}, {"4.q1": '"b"', "4.p1": '"line"'})
    for cell in raw["cells"]:
        if cell["id"] == "setup":
            cell["source"] = "import os; os._exit(0)"
    rebuilt = rebuild(official("04"), parsed(raw)).raw
    wanted = {cell.id: cell.text for cell in official("04").cells}
    changed = {c["id"] for c in rebuilt["cells"] if "".join(c["source"]) != wanted[c["id"]]}
    exercises = {f"exercise-4-{i}" for i in range(1, 6)}  # each ends with the official check
    assert {"exercise-4-3", "quiz-4-q1", "predict-4-p1"} <= changed <= exercises | {"quiz-4-q1", "predict-4-p1"}
    assert [c["id"] for c in rebuilt["cells"]] == [cell.id for cell in official("04").cells]


@pytest.mark.parametrize("student", ["check_deleted", "replaces_check", "skip_comment", "cell_turned_into_text", "format_4_2"])
def test_the_rebuilt_cell_ends_with_the_official_check_and_skips_nothing(student: str) -> None:
    rebuilt = rebuild(official("04"), parsed(mangled.CELLS[student][0]())).raw
    cell = next(c for c in rebuilt["cells"] if c["id"] == "exercise-4-3")
    assert cell["cell_type"] == "code" and "tags" not in cell["metadata"]
    text = "".join(cell["source"])
    assert text.endswith('from checks import check\ncheck("4.3")') and "NBVAL" not in text
