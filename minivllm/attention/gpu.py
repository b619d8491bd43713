"""The GPU backend: the Triton kernels of `triton_kernels.py` as torch operators. Lab 08 builds two of the kernels. May not know
requests or the scheduler.

As registered operators the kernels are one step each to whoever looks at the model from outside: torch.compile, CUDA graph
capture, the graph-safety check, the operator recorder.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from minivllm.attention.interface import AttentionBackend

MIN_CAPABILITY = (7, 5)


def _write_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    from minivllm.attention import triton_kernels

    triton_kernels.write_kv(key, value, kv_cache, slot_mapping)


def _decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    from minivllm.attention import triton_kernels

    return triton_kernels.paged_decode(q, kv_cache, block_tables, seq_lens, scale=scale, sliding_window=sliding_window)


def _prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    from minivllm.attention import triton_kernels

    return triton_kernels.paged_prefill(
        q, kv_cache, query_start_loc, block_tables, seq_lens, scale=scale, sliding_window=sliding_window
    )


def _register(name: str, body: Callable[..., Any], mutates: tuple[str, ...] = ()) -> Any:
    """An operator whose result, if it has one, looks like its first argument."""
    operator = torch.library.custom_op(f"minivllm::{name}", body, mutates_args=mutates)
    operator.register_fake(
        lambda first, *_: None if mutates else torch.empty_like(first, memory_format=torch.contiguous_format)
    )
    return operator


_write_kv_op = _register("triton_write_kv", _write_kv, ("kv_cache",))
_decode_op = _register("triton_paged_decode", _decode)
_prefill_op = _register("triton_paged_prefill", _prefill)

# What stands behind each operator, for the graph-safety check: to whoever watches operators, their insides are invisible.
OPERATOR_BODIES: dict[str, Callable[..., Any]] = {
    "minivllm::triton_write_kv": _write_kv,
    "minivllm::triton_paged_decode": _decode,
    "minivllm::triton_paged_prefill": _prefill,
}


def write_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """As `reference.write_kv`."""
    _write_kv_op(key, value, kv_cache, slot_mapping)


def paged_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """As `reference.paged_decode`, reading the cache in place; a padding row (seq_len 0) comes out as zeros."""
    out: torch.Tensor = _decode_op(q, kv_cache, block_tables, seq_lens, scale, sliding_window)
    return out


def paged_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """As `reference.paged_prefill`, all sequences in one launch."""
    out: torch.Tensor = _prefill_op(q, kv_cache, query_start_loc, block_tables, seq_lens, scale, sliding_window)
    return out


TRITON = AttentionBackend(name="triton", write_kv=write_kv, decode=paged_decode, prefill=paged_prefill, is_capturable=True)


def triton_backend(device_type: str, dtype: torch.dtype) -> AttentionBackend:
    """The backend, if it runs here. Raises ValueError that says why it does not."""
    if reason := why_not(device_type, dtype):
        raise ValueError(f"attention_backend='triton' {reason} Use attention_backend='auto'.")
    return TRITON


def why_not(device_type: str, dtype: torch.dtype) -> str | None:
    """None if the Triton kernels run on this device in this dtype, else the reason and what to do, as the end of a sentence."""
    try:
        import triton
    except ImportError:
        from minivllm.attention.triton_utils import why_no_triton

        return why_no_triton()
    if device_type == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "needs an NVIDIA GPU; without one it runs in Triton's interpreter, very slowly, with TRITON_INTERPRET=1 set."
        if dtype == torch.bfloat16:
            return f"in bfloat16 gives wrong numbers in Triton {triton.__version__}'s interpreter. Use dtype='float32'."
        return None
    capability = torch.cuda.get_device_capability()
    shown = ".".join(map(str, capability))
    if capability < MIN_CAPABILITY:
        return f"needs compute capability 7.5 or more; {torch.cuda.get_device_name()} has {shown}."
    if dtype == torch.bfloat16 and capability < (8, 0):
        return f"in bfloat16 needs compute capability 8.0 or more; {torch.cuda.get_device_name()} has {shown}."
    return _why_triton_cannot_build()


def has_tensor_cores_for_triton() -> bool:
    """Whether tl.dot becomes matrix instructions. Before compute capability 8.0 it becomes one multiplication after another: no
    loss where memory is the limit, as in decode; for a prompt, many times what PyTorch's fused kernel takes."""
    return torch.cuda.get_device_capability() >= (8, 0)


def _why_triton_cannot_build() -> str | None:
    """Triton compiles a few lines of C for each kernel's launch."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "needs a C compiler, gcc or clang (or its path in CC): install one (Debian, Ubuntu: apt install gcc)."
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        return f"needs Python's headers, and {headers} has no Python.h: install them (Debian, Ubuntu: apt install python3-dev)."
    return None
