"""Notebooks, archives and answers of any shape: each is told, or taken. None is a traceback, and none blocks the others."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checks.student import pack, quiz
from checks.student.engine import build
from checks.student.failure import CheckFailed
from checks.student.home import answers_dir, results_dir, write_atomically
from checks.student.ipynb import Unreadable, parse_notebook, read_notebook, replies_in
from checks.student.questions import questions
from checks.student.restore import restore
from checks.student.results import _groups, read_results
from checks.student.update import merge, official_labs, update

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "labs" / "04_paged_kv.ipynb"
Raw = dict[str, Any]


def exercise_of(raw: Raw) -> Raw:
    return next(c for c in raw["cells"] if c["metadata"].get("minivllm", {}).get("exercise") == "4.3")


def source(text: Any) -> Callable[[Raw], None]:
    return lambda raw: exercise_of(raw).update(source=text)


def each(**fields: Any) -> Callable[[Raw], None]:
    return lambda raw: [cell.update(fields) for cell in raw["cells"]] and None  # type: ignore[func-returns-value]


DAMAGE: dict[str, Callable[[Raw], None]] = {
    "half a character in code": source('x = "\ud800"'),
    "half a character in text": lambda raw: raw["cells"].append({"cell_type": "markdown", "source": "\ud800"}),
    "a null byte": source("x = 1\0"),
    "ten thousand brackets": source("(" * 10_000),
    "a hundred thousand signs": source("x = " + "-" * 100_000 + "1"),
    "such a cell beside the exercises": lambda raw: raw["cells"].append(
        {"cell_type": "code", "source": "x = " + "-" * 100_000 + "1"}
    ),
    "a source that is a number": source(5),
    "a source of lists": source([[1], {}]),
    "an exercise that is a list": lambda raw: exercise_of(raw).update(id=None, metadata={"minivllm": {"exercise": ["4.3"]}}),
    "an exercise that is an object": lambda raw: exercise_of(raw).update(
        id=None, metadata={"minivllm": {"exercise": {"a": 1}}}
    ),
    "ids that are objects": each(id={}),
    "one id for all": each(id="same"),
    "cell types that are null": each(cell_type=None),
    "outputs that are numbers": each(outputs=5),
    "metadata that are lists": each(metadata=[]),
    "cells that are none": lambda raw: raw["cells"].extend([None, 1, "x", [], {}]),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
def test_a_notebook_of_any_shape_can_be_updated_and_restored(
    student: Path, tmp_path: Path, damage: Callable[[Raw], None]
) -> None:
    raw = json.loads(LAB.read_text(encoding="utf-8"))
    damage(raw)
    path = tmp_path / "04.ipynb"
    path.write_text(json.dumps(raw), encoding="utf-8")
    assert update([path], official_labs(str(ROOT / "labs")))
    assert restore([path], check=False)
    assert len(read_notebook(path).cells) >= len(json.loads(LAB.read_text(encoding="utf-8"))["cells"])


def test_half_a_character_survives_an_update(student: Path, tmp_path: Path) -> None:
    raw = json.loads(LAB.read_text(encoding="utf-8"))
    raw["cells"].append({"cell_type": "markdown", "id": "mine", "metadata": {}, "source": "before \ud800 after"})
    path = tmp_path / "04.ipynb"
    path.write_text(json.dumps(raw), encoding="utf-8")
    raw["cells"][0]["source"] = "old"
    path.write_text(json.dumps(raw), encoding="utf-8")
    assert update([path], official_labs(str(ROOT / "labs")))
    assert read_notebook(path).cells[-1].text == "before \ud800 after"


KEYS = ["cells", "metadata", "minivllm", "lab", "exercise", "source", "id", "cell_type", "nbformat", "outputs", "kind"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


@settings(suppress_health_check=list(HealthCheck))
@given(raw=json_values, cells=st.lists(json_values, max_size=4))
def test_any_json_is_a_notebook_or_says_why_it_is_none(raw: Any, cells: list[Any]) -> None:
    for value in (raw, {"nbformat": 4, "metadata": raw, "cells": cells}):
        try:
            found = parse_notebook(Path("x.ipynb"), json.dumps(value))
        except Unreadable:
            continue
        list(replies_in(found))
        merge(found, read_notebook(LAB))


# ---------------------------------------------------------------------- archives


def packed(path: Path, entries: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("minivllm.json", json.dumps({"what": "minivllm labs, a student's work", "version": 1}))
        for name, data in entries.items():
            archive.writestr(name, data)
    return path


def test_an_archive_that_would_fill_the_disk_is_refused_before_it_is_read(
    student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "MAX_UNPACKED_BYTES", 1_000_000)
    path = packed(tmp_path / "work.zip", {"notebooks/a.ipynb": b" " * 1_000_001})
    assert path.stat().st_size < 5_000
    with pytest.raises(CheckFailed, match=r"unpacks to 1 MB"):
        pack.unpack(path, tmp_path / "labs")
    assert not (tmp_path / "labs").exists()


def test_an_archive_that_is_encrypted_or_packed_another_way_or_damaged_is_named(student: Path, tmp_path: Path) -> None:
    whole = packed(tmp_path / "work.zip", {"notebooks/a.ipynb": b"x" * 10_000}).read_bytes()
    start = whole.find(b"notebooks/a.ipynb") + 20
    encrypted = whole.replace(b"PK\x01\x02\x14\x03\x14\x00\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01\x00")
    for data in (
        encrypted,
        whole.replace(b"\x08\x00", b"\x63\x00"),
        whole[:start] + b"\xff" * 8 + whole[start + 8 :],
        whole[:-30],
    ):
        assert data != whole
        (tmp_path / "work.zip").write_bytes(data)
        with pytest.raises(CheckFailed, match=r"is not a file that `python -m checks pack` wrote"):
            pack.unpack(tmp_path / "work.zip", tmp_path / "labs")


@pytest.mark.parametrize("text", ["def (", "x = " + "-" * 100_000 + "1", "x = 1\0"], ids=["no Python", "too deep", "null"])
def test_a_kept_answer_that_is_damaged_is_left_out_and_named(
    student: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """Else no engine could be built, and nothing kept, until somebody finds the file."""
    write_atomically(answers_dir() / "4.1.py", text)
    build()
    assert "Your kept answer to 4.1" in capsys.readouterr().out


@settings(suppress_health_check=list(HealthCheck))
@given(raw=json_values, value=json_values | st.sampled_from([0, -1.0, 10**400, 1e-9, "12", True]))
def test_any_saved_result_is_drawn_or_left_out(student: Path, raw: Any, value: Any) -> None:
    """The journey's axis is logarithmic, and a file may come from anywhere."""
    whole = {"lab": "04", "tokens_per_second": 3.0, "what": "mine", "requests": 1, "alone": None, "quantity": None}
    for result in (raw, *({**whole, name: value} for name in whole)):
        write_atomically(results_dir() / "04.json", json.dumps(result))
        for found in read_results():
            assert math.isfinite(math.log10(found["tokens_per_second"]))
            _groups([found])


# ---------------------------------------------------------------------- answers


def question(numeric: bool) -> str:
    found = (q for lab in ("00", "01", "02", "03") for q in questions(lab).values())
    return next(q.id for q in found if q.answer is not None and bool(q.draw) == numeric)


def broken(**numbers: int) -> float:
    return 1 / 0


@pytest.mark.parametrize("answer", [10**400, -(10**400), 10**5000, broken, lambda **numbers: 10**400], ids=lambda a: "")
def test_an_answer_that_is_no_number_a_machine_has_is_told(student: Path, answer: Any) -> None:
    with pytest.raises(CheckFailed, match=r"is answered with a number|raised ZeroDivisionError: division by zero"):
        quiz.quiz(question(numeric=True), answer)


@settings(suppress_health_check=list(HealthCheck))
@given(name=st.text() | st.integers() | st.none(), answer=json_values | st.binary() | st.complex_numbers())
def test_any_question_and_answer_is_told_or_taken(student: Path, name: Any, answer: Any) -> None:
    for asked in (name, question(numeric=True), question(numeric=False), "9" * 5000, "../../x.q1"):
        for verb in (quiz.quiz, quiz.predict):
            try:
                verb(asked, answer)
            except CheckFailed:
                continue
