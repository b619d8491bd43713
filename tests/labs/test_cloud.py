"""A lab's first code cell: nothing happens where all is here; on a rented machine what is missing comes, and torch stays."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from checks import cloud

ROOT = Path(__file__).resolve().parents[2]
LABS = sorted((ROOT / "labs").glob("[0-9][0-9]_*.ipynb"))


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would have been run, and the constraints they were given."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        pinned = Path(command[command.index("-c") + 1]).read_text()
        commands.append([*command, pinned])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(cloud.subprocess, "run", run)
    monkeypatch.delenv("MINIVLLM_INSTALL", raising=False)
    return commands


def lacking(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    monkeypatch.setattr(cloud, "installed_version", lambda name: versions.get(name.replace("-", "_"), "999"))


def test_it_does_nothing_where_all_is_here(
    monkeypatch: pytest.MonkeyPatch, pip: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    lacking(monkeypatch)
    monkeypatch.setenv("COLAB_RELEASE_TAG", "x")
    cloud.ready()
    assert pip == [] and capsys.readouterr().out == ""


def test_at_home_it_says_what_is_missing_and_installs_nothing(
    monkeypatch: pytest.MonkeyPatch, pip: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    lacking(monkeypatch, gguf=None)
    cloud.ready()
    assert pip == [] and "Missing in this Python: gguf>=0.17" in capsys.readouterr().out


def test_only_what_is_missing_is_installed_and_torch_and_numpy_are_pinned(
    monkeypatch: pytest.MonkeyPatch, pip: list[list[str]]
) -> None:
    lacking(monkeypatch, gguf=None, torch="2.9.1+cu126", numpy="2.0.2")
    monkeypatch.delitem(sys.modules, "gguf", raising=False)  # an earlier test may have imported the real one
    monkeypatch.setenv("COLAB_RELEASE_TAG", "x")
    cloud.ready()
    ((*command, pinned),) = pip
    assert command[-1] == "gguf>=0.17" and command.count("gguf>=0.17") == 1
    assert pinned == "torch==2.9.1+cu126\nnumpy==2.0.2\n" and not any(word.startswith("torch") for word in command)


def test_a_restart_is_announced_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch, pip: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    lacking(monkeypatch, transformers="4.57.1")
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "x")
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    said_before: list[str] = []
    monkeypatch.setattr(cloud, "_install", lambda wanted: said_before.append(capsys.readouterr().out))
    with pytest.raises(RuntimeError, match="Restart the kernel now"):
        cloud.ready()
    assert "must be RESTARTED" in said_before[0]


def test_a_torch_that_is_too_old_is_left_alone(monkeypatch: pytest.MonkeyPatch, pip: list[list[str]]) -> None:
    lacking(monkeypatch, torch="2.4.0", gguf=None)
    monkeypatch.setenv("COLAB_RELEASE_TAG", "x")
    with pytest.raises(RuntimeError, match=r"needs torch>=2\.9, which is not changed here"):
        cloud.ready()
    assert pip == []


@pytest.mark.parametrize("repository", ["", "owner/name"])
def test_the_cell_is_plain_python_and_silent_here(repository: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = cloud.first_cell(repository)
    assert "%" not in text and "!" not in text
    exec(compile(text, "<first cell>", "exec"), {})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("path", LABS, ids=lambda p: p.stem)
def test_every_lab_has_it_as_its_first_code(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    first = next(cell for cell in cells if cell["cell_type"] == "code")
    assert first["id"] == "get-ready" and "".join(first["source"]) == cloud.first_cell()
