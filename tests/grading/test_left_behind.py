"""After a kill: what the killed run left behind is found and removed by the next, and nothing of a run that lives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from checks.grading.run import run
from checks.sandbox import folders
from checks.sandbox.folders import hold, sweep
from tests.grading import mangled
from tests.grading.conftest import options

posix = pytest.mark.skipif(sys.platform == "win32", reason="folders are locked on POSIX alone")
HOLDS = "import sys, time; from checks.sandbox.folders import hold; print(hold('jail').path, flush=True); time.sleep(600)"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def holder() -> tuple[subprocess.Popen[str], Path]:
    """A process with a folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS], cwd=mangled.ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@posix
def test_what_a_killed_process_held_is_swept_and_what_a_living_one_holds_is_not(temporary: Path) -> None:
    (dead, his), (living, hers), mine = holder(), holder(), hold("nbval")
    try:
        (his / "left").mkdir()
        (his / "left" / "notebook.ipynb").write_text("{}")
        assert his.parent == temporary and sweep() == 0
        os.kill(dead.pid, signal.SIGKILL)
        dead.wait()
        assert sweep() == 1 and not his.exists()
        assert hers.is_dir() and Path(mine.path).is_dir()
    finally:
        for process in (dead, living):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    mine.remove()
    assert sweep() == 1 and not list(temporary.iterdir())


@posix
def test_a_program_that_is_started_does_not_hold_the_folder(temporary: Path) -> None:
    mine = hold("jail")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        os.close(mine._lock or 0)  # as if this process had ended
        assert sweep() == 1
    finally:
        child.communicate(b"\n")


@posix
def test_a_folder_that_a_sweep_takes_while_it_is_made_is_made_again(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, taken = folders._locked, []

    def late(path: str) -> int | None:
        if not taken:
            taken.append(path)
            os.rmdir(path)
        return real(path)

    monkeypatch.setattr(folders, "_locked", late)
    mine = hold("jail")
    assert taken and mine.path != taken[0] and Path(mine.path).is_dir()
    mine.remove()


@posix
def test_other_folders_and_other_peoples_are_left_alone(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temporary / "minivllm-models").mkdir()
    theirs = temporary / "minivllm-held-jail-x"
    theirs.mkdir()
    (temporary / "minivllm-held-link").symlink_to(temporary / "minivllm-models")
    monkeypatch.setattr(os, "getuid", lambda: theirs.stat().st_uid + 1)
    assert sweep() == 0 and theirs.is_dir()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert sweep() == 1 and (temporary / "minivllm-models").is_dir() and (temporary / "minivllm-held-link").is_symlink()


@posix
def test_each_run_sweeps_first(temporary: Path) -> None:
    process, his = holder()
    process.kill()
    process.communicate()
    (temporary / "in").mkdir()
    run(options(temporary / "in", temporary / "out"), say=lambda _: None)
    assert not his.exists()


@posix
def test_two_runs_into_one_folder_do_not_meet(tmp_path: Path) -> None:
    from filelock import FileLock

    (tmp_path / "in").mkdir()
    (tmp_path / "out" / ".run").mkdir(parents=True)
    with (
        FileLock(tmp_path / "out" / ".run" / "lock"),
        pytest.raises(ValueError, match=r"Another run is grading into .*out"),
    ):
        run(options(tmp_path / "in", tmp_path / "out"), say=lambda _: None)
    run(options(tmp_path / "in", tmp_path / "out"), say=lambda _: None)


@posix
def test_nothing_is_removed_through_a_mount(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is seen there lies somewhere else: a killed run's container may still have the course in it."""
    left = temporary / "minivllm-held-jail-old"
    left.mkdir()
    (left / "somebody's").write_text("work")
    monkeypatch.setattr(folders.os.path, "ismount", lambda path: Path(path) == left)
    assert sweep() == 0 and (left / "somebody's").exists()
    monkeypatch.setattr(folders.os.path, "ismount", lambda path: False)
    assert sweep() == 1 and not left.exists()
