"""python -m checks update: the new lab around the student's work, and the old notebook kept beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest

from checks.__main__ import main
from checks.student import update
from checks.student.ipynb import Notebook, parse_notebook
from checks.student.update import merge

STUB = 'from checks import check\n\n\ndef slot_mapping(positions, block_table, block_size):\n    {}\n\n\ncheck("4.3")'
UNSOLVED = STUB.format('raise NotImplementedError("Exercise 4.3: slot_mapping")')
SOLVED = STUB.format("return block_table[positions // block_size] * block_size + positions % block_size")


def cell(name: str | None, source: str, kind: str = "code", **metadata: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"cell_type": kind, "metadata": {"minivllm": metadata} if metadata else {}, "source": source}
    if name is not None:
        made["id"] = name
    return made | ({"outputs": [], "execution_count": None} if kind == "code" else {})


def raw(*cells: dict[str, Any], version: str = "1", minor: int = 5) -> dict[str, Any]:
    ours = {"lab": "04", "kind": "lab", "version": version}
    return {"nbformat": 4, "nbformat_minor": minor, "metadata": {"minivllm": ours}, "cells": list(cells)}


def notebook(*cells: dict[str, Any], **more: Any) -> Notebook:
    return parse_notebook(Path("04_paged_kv.ipynb"), json.dumps(raw(*cells, **more)))


TEXT, NEW_TEXT = cell("title", "# Old", "markdown"), cell("title", "# New", "markdown")
EXERCISE, QUESTION = cell("exercise-4-3", UNSOLVED, exercise="4.3"), cell("quiz-4-q1", 'quiz("4.q1", "?")', questions=["4.q1"])
DONE, ANSWERED = {**EXERCISE, "source": SOLVED}, {**QUESTION, "source": 'quiz("4.q1", "b")'}
OFFICIAL = notebook(NEW_TEXT, QUESTION, cell("brand-new", "x = 1"), EXERCISE, version="2")


def sources(merged: update.Merged) -> list[str]:
    nbformat.validate(nbformat.from_dict(merged.raw))
    return ["".join(c["source"]) for c in merged.raw["cells"]]


def test_answers_stay_and_everything_else_is_the_new_lab() -> None:
    merged = merge(notebook(TEXT, DONE, ANSWERED), OFFICIAL)
    assert sources(merged) == ["# New", 'quiz("4.q1", "b")', "x = 1", SOLVED]
    assert merged.raw["metadata"]["minivllm"]["version"] == "2"
    assert merged.kept == ["quiz-4-q1", "4.3"] and merged.replaced == ["title"]


@pytest.mark.parametrize(
    "answer", ["quiz('4.q1', answer='b')", "quiz(question='4.q1', answer='b')", "mine = 'b'\nquiz('4.q1', mine)"]
)
def test_an_answer_stays_however_it_was_written(answer: str) -> None:
    merged = merge(notebook(TEXT, {**QUESTION, "source": answer}), OFFICIAL)
    assert answer in sources(merged) and merged.kept == ["quiz-4-q1"]


def test_a_stub_and_an_open_question_become_the_new_ones() -> None:
    changed = {**EXERCISE, "source": UNSOLVED.replace("positions,", "p,")}
    assert sources(merge(notebook(changed, QUESTION), OFFICIAL)) == sources(merge(notebook(), OFFICIAL))


def test_a_cell_that_does_not_parse_is_work_too() -> None:
    broken = {**EXERCISE, "source": "def slot_mapping(positions\n    return"}
    assert sources(merge(notebook(broken), OFFICIAL))[-1] == broken["source"]


def test_added_cells_stay_behind_the_cell_they_followed() -> None:
    first, note, scratch = cell("a", "import os"), cell("b", "my notes", "markdown"), cell("c", "print(1)")
    merged = merge(notebook(first, TEXT, note, scratch, DONE), OFFICIAL)
    assert sources(merged)[:4] == ["import os", "# New", "my notes", "print(1)"]
    assert merged.added == ["a", "b", "c"]


def test_the_other_copies_of_an_exercise_are_kept_as_added() -> None:
    copy = {**DONE, "id": "copy", "source": SOLVED + "\n# second"}
    merged = merge(notebook(DONE, copy), OFFICIAL)
    assert sources(merged)[-2:] == [SOLVED + "\n# second", SOLVED] or SOLVED in sources(merged)
    assert len(merged.added) == 1 and sources(merged).count(SOLVED) == 1


def test_without_ids_the_same_cells_are_found_and_the_result_has_ids() -> None:
    def without(c: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in c.items() if key != "id"}

    mine = notebook(*(without(c) for c in (NEW_TEXT, DONE, ANSWERED, cell("mine", "print(1)"))), minor=2)
    merged = merge(mine, OFFICIAL)
    assert sorted(sources(merged)) == sorted(["# New", 'quiz("4.q1", "b")', "x = 1", SOLVED, "print(1)"])
    assert merged.raw["nbformat_minor"] == 5 and all(c["id"] for c in merged.raw["cells"])


def test_outputs_of_cells_that_did_not_change_stay() -> None:
    output = {"output_type": "stream", "name": "stdout", "text": ["passed\n"]}
    run = {**cell("brand-new", "x = 1"), "outputs": [output], "execution_count": 3}
    merged = merge(notebook(run, {**DONE, "outputs": [output]}), OFFICIAL)
    assert [c.get("outputs") for c in merged.raw["cells"][2:]] == [[output], [output]]


def test_merging_twice_changes_nothing() -> None:
    once = merge(notebook(TEXT, DONE, cell("c", "print(1)"), ANSWERED), OFFICIAL)
    again = merge(parse_notebook(Path("x"), json.dumps(once.raw)), OFFICIAL)
    assert again.raw == once.raw


# -------------------------------------------------------------------------------------------------------------- files


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "Kopie von 04.ipynb"
    path.write_text(json.dumps(raw(TEXT, DONE)), encoding="utf-8")
    return path


@pytest.fixture
def new_labs(tmp_path: Path) -> Path:
    folder = tmp_path / "download" / "labs"
    folder.mkdir(parents=True)
    (folder / "04_paged_kv.ipynb").write_text(json.dumps(OFFICIAL.raw), encoding="utf-8")
    return folder.parent


def test_the_file_is_updated_and_kept_as_it_was(
    student: Path, mine: Path, new_labs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = mine.read_bytes()
    assert main(["update", str(mine), "--from", str(new_labs)]) == 0
    shown = capsys.readouterr().out
    assert "your answers, kept: 4.3" in shown and "the new ones now: title" in shown
    assert [c["id"] for c in json.loads(mine.read_text())["cells"]] == ["title", "quiz-4-q1", "brand-new", "exercise-4-3"]
    (backup,) = (student / ".progress" / "backups").iterdir()
    assert backup.read_bytes() == before
    assert main(["update", str(mine), "--from", str(new_labs)]) == 0
    assert "up to date" in capsys.readouterr().out and len(list(backup.parent.iterdir())) == 1


def test_an_end_at_the_worst_moment_leaves_the_old_notebook_whole(
    student: Path, mine: Path, new_labs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = mine.read_bytes()

    def killed(path: Path, text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(update, "write_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        main(["update", str(mine), "--from", str(new_labs)])
    assert mine.read_bytes() == before


def test_what_cannot_be_updated_is_named(
    student: Path, tmp_path: Path, new_labs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, other = tmp_path / "broken.ipynb", tmp_path / "other.ipynb"
    broken.write_text("{")
    other.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": []}))
    assert main(["update", str(broken), str(other), "--from", str(new_labs)]) == 1
    shown = capsys.readouterr().out
    assert "broken.ipynb: skipped, it is not JSON" in shown and "other.ipynb: skipped, its metadata names no lab" in shown


def test_new_labs_that_are_not_there_are_named(student: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["update", "--from", str(tmp_path)]) == 1
    assert main(["update", "--from", "no-such-revision"]) == 1
    shown = capsys.readouterr().err
    assert "There are no labs in" in shown and "--from FOLDER" in shown
