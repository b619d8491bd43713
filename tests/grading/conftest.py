"""For tests of grading: short limits, so that endless loops end soon, and one graded class that several tests look at."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from checks.exercises.lab_04 import CHECKS
from checks.grading.run import Options, run
from checks.sandbox.sandbox import Limits, close_server
from tests.grading import mangled

SHORT = Limits(cpu_seconds=1, wall_seconds=2.5, memory_bytes=256 << 20, output_bytes=1 << 20)
SECRET = "a secret of this test"


@contextlib.contextmanager
def shortened() -> Iterator[None]:
    """Lab 04's checks with short limits; only as long as it lasts, since other tests use them too."""
    before = dict(CHECKS)
    CHECKS.update({name: dataclasses.replace(check, limits=SHORT) for name, check in CHECKS.items()})
    try:
        yield
    finally:
        CHECKS.update(before)
        close_server()


@pytest.fixture
def short_limits() -> Iterator[None]:
    with shortened():
        yield


@pytest.fixture(scope="session")
def term(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """All mangled submissions, graded in one run."""
    folder = tmp_path_factory.mktemp("term")
    expected = mangled.write(folder / "handed in")
    with shortened():
        status = run(options(folder / "handed in", folder / "out"), say=lambda _: None)
    return SimpleNamespace(submissions=folder / "handed in", out=folder / "out", expected=expected, status=status)


def options(submissions: Path, out: Path, **more: object) -> Options:
    return Options(submissions, out, hidden_seed=SECRET, nbval=False, **more)  # type: ignore[arg-type]
