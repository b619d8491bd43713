"""Where the Triton backend runs and where not, and the kernels' numbers, which `interpreted_triton.py` checks without a GPU.
That they compile for one is `test_triton_compile.py`'s."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from minivllm.attention import get_backend

pytest.importorskip("triton", reason="Triton has packages for Linux only")
FP16, FP32 = torch.float16, torch.float32
HERE = Path(__file__).resolve().parent


@pytest.mark.slow
def test_the_kernels_equal_the_reference_in_the_interpreter() -> None:
    """In a process of its own: Triton decides once, when it is imported, whether it interprets."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted_triton.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE.parents[1], env=environment)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_on_a_cpu_it_is_refused_and_says_what_can_be_done() -> None:
    with mock.patch.dict(os.environ), pytest.raises(ValueError, match=r"'triton' needs an NVIDIA GPU; .*TRITON_INTERPRET=1"):
        os.environ.pop("TRITON_INTERPRET", None)
        get_backend("triton", "cpu", FP32)


def test_bfloat16_is_refused_where_it_would_be_wrong() -> None:
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"), pytest.raises(ValueError, match="bfloat16 gives wrong numbers"):
        get_backend("triton", "cpu", torch.bfloat16)


@pytest.mark.parametrize(
    ("capability", "dtype", "words"),
    [
        ((7, 0), FP16, r"needs compute capability 7\.5 or more; Some GPU has 7\.0"),
        ((7, 5), torch.bfloat16, r"in bfloat16 needs compute capability 8\.0 or more; Some GPU has 7\.5"),
    ],
)
def test_a_gpu_that_is_too_old_is_told(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")
    with pytest.raises(ValueError, match=words):
        get_backend("triton", "cuda", dtype)
    assert get_backend("auto", "cuda", dtype).name == "reference, fused prefill"


def test_a_gpu_gets_the_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    backend = get_backend("auto", "cuda", torch.bfloat16)
    assert (backend.name, backend.is_capturable) == ("triton", True)
