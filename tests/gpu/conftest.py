"""What the GPU tests share. They need no network and no packages beyond the engine's and pytest's: weights are random."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def full_float32_and_freed_memory() -> Iterator[None]:
    """Products of float32 are compared with float32's precision; and what one test allocated is not there in the next."""
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
