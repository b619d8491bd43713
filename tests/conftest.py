"""What every test folder shares: the real model, hypothesis profiles, and a quiet environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from minivllm.text.tokenizer import Tokenizer

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

if (workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT")) is not None:  # `make test`: the processes share the processors
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))

from hypothesis import HealthCheck, settings

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("ci", max_examples=60, deadline=None, derandomize=True, suppress_health_check=_QUIET, print_blob=True)
settings.register_profile("check", parent=settings.get_profile("ci"), max_examples=20)  # `make check`
settings.register_profile("fuzz", max_examples=5000, deadline=None, suppress_health_check=_QUIET, print_blob=True)
settings.register_profile("round", max_examples=400, deadline=None, suppress_health_check=_QUIET, print_blob=True)  # fuzz.py
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the real model, fetched on first use (98 MB, kept in the user's cache)."""
    from minivllm.models.hub import fetch

    return fetch("smollm2-135m")


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    """A small tokenizer of Llama 2's kind: pieces with ▁ for a space, and bytes for what has none."""
    from tests.text.small_tokenizers import make_sentencepiece

    return make_sentencepiece()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are shown as skipped, with the reason, where there is no GPU."""
    gpu = [item for item in items if "gpu" in item.keywords]
    if gpu:
        import torch

        if not torch.cuda.is_available():
            for item in gpu:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and torch sees none"))
