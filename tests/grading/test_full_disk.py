"""A disk that is full while a class is graded: one error that names the file, no half of any file, and the same gradebook once
there is room again."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checks.__main__ import main
from checks.grading import one
from checks.grading.outputs import write_all
from checks.grading.run import run
from checks.student import home
from tests.grading import mangled
from tests.grading.conftest import SECRET, options
from tests.grading.test_outputs import submission


class Disk:
    """Has room for `room` characters in all, and takes half of what does not fit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = float("inf")
        real = os.fdopen

        def fdopen(handle: int, *more: Any, **named: Any) -> Any:
            file = real(handle, *more, **named)
            write: Callable[[str], int] = file.write

            def limited(text: str) -> int:
                self.room -= len(text)
                if self.room < 0:
                    write(text[: len(text) // 2])
                    raise OSError(errno.ENOSPC, "No space left on device")
                return write(text)

            file.write = limited
            return file

        monkeypatch.setattr(home.os, "fdopen", fdopen)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def files(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


def test_wherever_the_disk_is_full_each_file_is_the_old_one_or_the_new_one(tmp_path: Path, disk: Disk) -> None:
    def records(folder: str, *students: str) -> Path:
        (tmp_path / folder).mkdir()
        for student in students:
            (tmp_path / folder / f"{student}.json").write_text(submission(student).to_json(), encoding="utf-8")
        return tmp_path / folder

    before, after, out = records("before", "ada"), records("after", "ada", "bob"), tmp_path / "out"
    write_all(before, out)
    old = files(out)
    write_all(after, tmp_path / "wanted")
    new = files(tmp_path / "wanted")
    for room in range(0, sum(map(len, new.values())), 997):
        disk.room = room
        with pytest.raises(OSError) as caught:
            write_all(after, out)
        assert caught.value.errno == errno.ENOSPC and str(caught.value.filename).startswith(str(out))
        for name, content in files(out).items():
            assert content in (old.get(name), new.get(name)), f"{name} is half of one, with room for {room}"
    disk.room = float("inf")
    write_all(after, out)
    assert files(out) == new


def test_a_class_that_met_a_full_disk_is_graded_to_the_same_gradebook_once_there_is_room(
    tmp_path: Path, short_limits: None, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, raw in (("a", mangled.solved()), ("b", mangled.lab())):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "x.ipynb").write_text(json.dumps(raw), encoding="utf-8")
    run(options(tmp_path / "in", tmp_path / "wanted", labs=("04",)), say=lambda _: None)
    out = tmp_path / "out"
    command = ["grade", str(tmp_path / "in"), "--out", str(out), "--labs", "04", "--jobs", "1"]
    command += ["--no-nbval", "--hidden-seed", SECRET]
    disk.room = 3000  # for what the run is, and the first record
    assert main(command) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"Grading stopped: {out}") and "No space left on device. Make room there" in told
    assert not (out / "gradebook.csv").exists() and not (out / ".trees").exists()
    disk.room = 8000
    assert main(command) == 1
    disk.room = float("inf")
    assert main(command) == 0
    for name in ("gradebook.csv", "incidents.csv", "canvas.csv", "moodle.csv", "junit.xml", "report.html"):
        assert (out / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes()
    assert not list(out.rglob("*.tmp"))


def test_a_full_disk_under_the_grader_is_nobodys_points(
    tmp_path: Path, short_limits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No folder for a jail, say: the run ends, and does not go on to tell everybody that they could not be graded."""
    (tmp_path / "in" / "a").mkdir(parents=True)
    (tmp_path / "in" / "a" / "x.ipynb").write_text(json.dumps(mangled.solved()), encoding="utf-8")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/x")

    monkeypatch.setattr(one, "rebuild", full)
    with pytest.raises(OSError, match="No space left"):
        run(options(tmp_path / "in", tmp_path / "out"), say=lambda _: None)
    monkeypatch.undo()
    run(options(tmp_path / "in", tmp_path / "out"), say=lambda _: None)
    assert "a,0,0,1,0,0" in (tmp_path / "out" / "gradebook.csv").read_text(encoding="utf-8")


def test_what_the_grader_itself_failed_on_is_graded_again(
    tmp_path: Path, short_limits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in" / "a").mkdir(parents=True)
    (tmp_path / "in" / "a" / "x.ipynb").write_text(json.dumps(mangled.solved()), encoding="utf-8")

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(one, "rebuild", broken)
    run(options(tmp_path / "in", tmp_path / "out"), say=lambda _: None)
    assert "grader_error" in (tmp_path / "out" / "incidents.csv").read_text(encoding="utf-8")
    monkeypatch.undo()
    run(options(tmp_path / "in", tmp_path / "out"), say=lambda _: None)
    assert "a,0,0,1,0,0" in (tmp_path / "out" / "gradebook.csv").read_text(encoding="utf-8")
