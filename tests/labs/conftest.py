"""For tests of the labs: a student's folder of their own, and notebooks run in a real kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def student(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh student's folder, for this process and the kernels it starts."""
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path / "home"


class Kernel:
    """A real kernel, as a front end uses one."""

    def __init__(self, cwd: Path) -> None:
        self._manager, self._client = start_new_kernel(cwd=str(cwd), env={**os.environ, "PYTHONPATH": str(ROOT)})

    def run(self, *cells: str) -> list[str]:
        """What each cell shows: its streams, or its error as displayed."""
        return [self._run(cell) for cell in cells]

    def _run(self, cell: str) -> str:
        shown: list[str] = []

        def on_output(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                shown.append(content["text"])
            elif message["msg_type"] == "error":
                shown.append(f"{content['ename']}\n" + "\n".join(content["traceback"]))
            elif "data" in content:
                shown.append(content["data"].get("text/plain", ""))

        self._client.execute_interactive(cell, timeout=120, output_hook=on_output, allow_stdin=False)
        return "".join(shown)

    def restart(self) -> None:
        self._manager.restart_kernel(now=True)
        self._client.wait_for_ready(timeout=60)

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture(scope="session")
def one_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path_factory.mktemp("notebooks"))
    yield kernel
    kernel.close()


@pytest.fixture
def kernel(one_kernel: Kernel, student: Path) -> Kernel:
    """The session's kernel (starting one for each test would take minutes), with nothing in it and a fresh student's folder."""
    shown = one_kernel.run("%reset -f", f"import os; os.environ['MINIVLLM_HOME'] = {str(student)!r}; del os")
    assert shown == ["", ""]
    return one_kernel


@pytest.fixture
def run_cells(kernel: Kernel) -> Callable[..., list[str]]:
    return kernel.run


@pytest.fixture
def nbval(student: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """pytest --nbval-lax on one notebook, as an instructor would run it."""

    def run(notebook: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--nbval-lax",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(notebook.parent),
        ]
        return subprocess.run(
            [*command, *options, notebook.name],
            cwd=notebook.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},  # other tests share the cores
            capture_output=True,
            text=True,
            timeout=600,
        )

    return run


@pytest.fixture(scope="session", autouse=True)
def no_fork_server_left() -> Iterator[None]:
    yield
    from checks.sandbox.sandbox import close_server

    close_server()
