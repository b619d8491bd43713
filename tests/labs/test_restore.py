"""The notebooks are the truth: my_engine/ and progress come back from them, whatever happened to the files on the way."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checks.__main__ import main
from checks.authoring.source import answer_source
from checks.exercises import find
from checks.student import pack
from checks.student.engine import components, save_answer
from checks.student.home import changing_progress, read_progress
from checks.student.ipynb import Unreadable, read_notebook

ROOT = Path(__file__).resolve().parents[2]
Change = Callable[[dict[str, Any]], None]
SOLVED = "from checks import check\n" + answer_source(find("4.3")) + '\n\ncheck("4.3")'
WRONG = SOLVED.replace("% block_size", "% (block_size + 1)")


@pytest.fixture
def lab(tmp_path: Path) -> Callable[..., Path]:
    """The official Lab 04 with one exercise's cell replaced, saved under a name, after a change."""

    def save(text: str = SOLVED, name: str = "04_paged_kv.ipynb", change: Change | None = None) -> Path:
        notebook = json.loads((ROOT / "labs" / "04_paged_kv.ipynb").read_text(encoding="utf-8"))
        cell_of(notebook)["source"] = text.splitlines(keepends=True)
        if change is not None:
            change(notebook)
        path = tmp_path / name
        path.write_text(json.dumps(notebook), encoding="utf-8")
        return path

    return save


def cell_of(notebook: dict[str, Any], exercise: str = "4.3") -> dict[str, Any]:
    (cell,) = [c for c in notebook["cells"] if c["metadata"].get("minivllm", {}).get("exercise") == exercise]
    return cell


def status(exercise: str = "4.3") -> str | None:
    return read_progress()["exercises"].get(exercise, {}).get("status")


def test_what_passes_is_in_my_engine_and_stubs_are_not_attempted(
    student: Path, lab: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["restore", str(lab())]) == 0
    shown = capsys.readouterr().out
    assert "(Lab 04)" in shown and "4.3   passed" in shown and "4.1   not attempted" in shown
    assert list(components()) == ["slot_mapping"] and status() == "passed" and status("4.1") is None


def test_a_wrong_answer_is_not_restored_unless_it_is_not_checked(
    student: Path, lab: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["restore", str(lab(WRONG))]) == 0
    assert "4.3   not right yet (wrong value)" in capsys.readouterr().out and dict(components()) == {}
    assert main(["restore", "--no-check", str(lab(WRONG))]) == 0
    assert list(components()) == ["slot_mapping"] and status() == "restored"


def test_the_metadata_decides_not_the_name(student: Path, lab: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    main(["restore", str(lab(name="03 the kv cache-Kopie für später.ipynb"))])
    assert "(Lab 04)" in capsys.readouterr().out and status() == "passed"


def without_ids(notebook: dict[str, Any]) -> None:
    """Format 4.2, as older tools write it."""
    notebook["nbformat_minor"] = 2
    for cell in notebook["cells"]:
        del cell["id"]


def null_ids(notebook: dict[str, Any]) -> None:
    for cell in notebook["cells"]:
        cell["id"] = None


def without_metadata(notebook: dict[str, Any]) -> None:
    """All that is left of the exercise is its call of check."""
    without_ids(notebook)
    notebook["metadata"] = {}
    for cell in notebook["cells"]:
        cell["metadata"] = {}


def source_as_one_string(notebook: dict[str, Any]) -> None:
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])


def markdown_by_mistake(notebook: dict[str, Any]) -> None:
    cell_of(notebook)["cell_type"] = "markdown"


def check_line_deleted(notebook: dict[str, Any]) -> None:
    cell = cell_of(notebook)
    cell["source"] = [line for line in cell["source"] if "check" not in line]


@pytest.mark.parametrize(
    "change", [without_ids, null_ids, without_metadata, source_as_one_string, markdown_by_mistake, check_line_deleted]
)
def test_an_exercise_is_found_whatever_happened_to_its_cell(student: Path, lab: Callable[..., Path], change: Change) -> None:
    assert main(["restore", str(lab(change=change))]) == 0
    assert status() == "passed"


@pytest.mark.parametrize(
    ("texts", "kept"),
    [
        ((SOLVED, SOLVED.replace("\n\n\n", "\n\n# second\n", 1)), "# second"),
        ((SOLVED + "\n# first", "raise NotImplementedError"), "# first"),
        ((SOLVED + "\n# first", WRONG), "# first"),
    ],
    ids=["the last", "a stub does not count", "the last that is right"],
)
def test_of_duplicates_the_last_that_counts_wins(
    student: Path, lab: Callable[..., Path], texts: tuple[str, str], kept: str
) -> None:
    def twice(notebook: dict[str, Any]) -> None:
        cell = cell_of(notebook)
        body = texts[1]
        if body.startswith("raise"):
            body = f'def slot_mapping(positions, block_table, block_size):\n    {body}("Exercise 4.3: slot_mapping")'
        copy = {**cell, "id": "copy-made-by-hand", "source": body.splitlines(keepends=True)}
        notebook["cells"].insert(notebook["cells"].index(cell) + 1, copy)

    main(["restore", str(lab(texts[0], change=twice))])
    assert kept in (student / ".progress" / "answers" / "4.3.py").read_text()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "it is empty"),
        (b'{"cells": [', "it is not JSON"),
        (b"[1, 2]", "not a notebook"),
        (b'{"nbformat": 3, "worksheets": []}', "format 3"),
        (b"\xff\xfe\x00", "not text in UTF-8"),
        (b"[" * 100_000, "it is not JSON"),
    ],
)
def test_a_file_that_is_no_notebook_is_named_and_the_others_are_restored(
    student: Path, lab: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes, words: str
) -> None:
    broken = tmp_path / "broken.ipynb"
    broken.write_bytes(data)
    assert main(["restore", str(broken), str(tmp_path / "missing.ipynb"), str(lab())]) == 1
    shown = capsys.readouterr().out
    assert f"{broken}: skipped, " in shown and words in shown and "missing.ipynb: skipped, No such file" in shown
    assert status() == "passed"


def test_a_huge_file_is_not_even_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.ipynb"
    with path.open("wb") as file:
        file.truncate(200 << 20)
    with pytest.raises(Unreadable, match="it has 210 MB"):
        read_notebook(path)


def test_predictions_and_answers_come_back_and_formulas_are_left(student: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["restore", "--no-check", str(ROOT / "solutions" / "04_paged_kv.ipynb")])
    state = read_progress()
    assert state["predictions"]["4.p1"]["answer"] == "many" and state["quiz"]["4.q1"]["right"] is True
    assert "4.q4" not in state["quiz"] and "noted again: 4.p1" in capsys.readouterr().out


def test_answers_by_keyword_or_name_come_back_too(student: Path, tmp_path: Path) -> None:
    raw = json.loads((ROOT / "solutions" / "04_paged_kv.ipynb").read_text(encoding="utf-8"))
    cells = {cell["id"]: cell for cell in raw["cells"]}
    for name, source in {
        "4.q1": "quiz(question='4.q1', answer='c')",
        "4.q2": "mine = 'a'\nquiz('4.q2', mine)",
        "4.q3": "quiz('4.q3', input())",
    }.items():
        cells[next(i for i, cell in cells.items() if f'quiz("{name}"' in "".join(cell["source"]))]["source"] = source
    path = tmp_path / "mine.ipynb"
    path.write_text(json.dumps(raw), encoding="utf-8")
    main(["restore", "--no-check", str(path)])
    assert {name: told["answer"] for name, told in read_progress()["quiz"].items()} == {"4.q1": "c", "4.q2": "a"}


def test_pack_and_unpack_carry_everything(
    student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lab: Callable[..., Path]
) -> None:
    notebook = lab()
    save_answer(find("4.3"), answer_source(find("4.3")))
    with changing_progress() as state:
        state["exercises"]["4.3"] = {"status": "passed"}
    (student / "results").mkdir()
    (student / "results" / "02.json").write_text("{}")
    file = tmp_path / "work.zip"
    assert main(["pack", str(file), "--notebooks", str(notebook)]) == 0
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path / "elsewhere"))
    assert status() is None
    assert main(["unpack", str(file), "--into", str(tmp_path / "labs")]) == 0
    assert (tmp_path / "labs" / notebook.name).read_bytes() == notebook.read_bytes()
    assert (tmp_path / "elsewhere" / "results" / "02.json").is_file()
    assert status() == "passed" and list(components()) == ["slot_mapping"]


def test_two_replacements_in_one_second_keep_both_former_works(
    student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the clock was set back."""
    monkeypatch.setattr("time.strftime", lambda form: "20261130-120000")
    kept = []
    for text in ("one", "two", "three"):
        (tmp_path / "a.ipynb").write_text(text)
        pack.pack(tmp_path / "work.zip", [tmp_path / "a.ipynb"])
        kept.append(pack.unpack(tmp_path / "work.zip", tmp_path / "labs")[1])
    assert kept[0] is None
    texts = [zipfile.ZipFile(path).read("notebooks/a.ipynb").decode() for path in kept[1:] if path is not None]
    assert texts == ["one", "two"]


def test_unpack_keeps_what_it_replaces(student: Path, tmp_path: Path, lab: Callable[..., Path]) -> None:
    there = lab()
    file = tmp_path / "work.zip"
    main(["pack", str(file), "--notebooks", str(there)])
    mine = lab(WRONG).read_bytes()
    assert main(["unpack", str(file), "--into", str(there.parent)]) == 0
    assert there.read_bytes() != mine
    (kept,) = (student / ".progress" / "backups").glob("before-unpack-*.zip")
    assert main(["unpack", str(kept), "--into", str(there.parent)]) == 0
    assert there.read_bytes() == mine


@pytest.mark.parametrize("name", ["../evil.py", "notebooks/../evil.ipynb", "/evil.ipynb", "my_engine/core/block_pool.py"])
def test_a_packed_file_that_would_write_elsewhere_is_refused_whole(
    student: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    import zipfile

    file = tmp_path / "forged.zip"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("minivllm.json", '{"version": 1}')
        archive.writestr("results/02.json", "{}")
        archive.writestr(name, "x")
    assert main(["unpack", str(file), "--into", str(tmp_path / "labs")]) == 1
    assert "Nothing was unpacked" in capsys.readouterr().err and not (student / "results").exists()


def test_a_file_that_is_not_packed_work_is_named(student: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("hello")
    assert main(["unpack", str(file)]) == 1
    assert "is not a file that `python -m checks pack` wrote" in capsys.readouterr().err


def test_pack_leaves_no_half_file(student: Path, tmp_path: Path) -> None:
    assert main(["pack", str(tmp_path / "work.zip"), "--notebooks", str(tmp_path / "missing.ipynb")]) == 1
    assert list(tmp_path.glob("*work*")) == []


def test_reset_forgets_one_exercise(student: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_answer(find("4.3"), answer_source(find("4.3")))
    assert main(["reset", "4.3"]) == 0 and dict(components()) == {}
    assert main(["reset", "9.9"]) == 1 and "no exercise and no lab '9.9'" in capsys.readouterr().err


def test_status_tells_exercises_quizzes_and_the_journey(student: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from checks.student.results import save_result

    main(["status"])
    assert "no experiment has run yet" in capsys.readouterr().out
    save_result("02", 31.4, "everything recomputed", {})
    main(["restore", "--no-check", str(ROOT / "solutions" / "02_naive_generation.ipynb")])
    main(["status"])
    shown = capsys.readouterr().out
    assert "2.1   greedy generation" in shown and "restored, not checked" in shown
    assert "Lab 02       31.4 tokens/s  everything recomputed" in shown and "exercises passed. Your work is in" in shown
    assert all(f"Lab {lab}" in shown for lab in ("00", "01", "02", "03", "04"))
