from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.harness import TINY_SETTINGS, Server, as_flags, serving, write_tiny_model


@pytest.fixture(scope="session")
def echo() -> Iterator[Server]:
    """A fast server for tests that leave it as they found it."""
    with serving("echo:2", "--block-size", "4", "--max-model-len", "512") as server:
        yield server


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Iterator[Server]:
    """A server with a real model, in small."""
    with serving(str(tiny_folder), "--served-model-name", "tiny", "other-name", *as_flags(TINY_SETTINGS)) as server:
        yield server


@pytest.fixture
def slow_echo() -> Iterator[Server]:
    """A server of one's own, with steps of 50 ms: requests last long enough to be interrupted."""
    with serving("echo:50", "--block-size", "4", "--max-model-len", "512", "--num-gpu-blocks-override", "257") as server:
        yield server
