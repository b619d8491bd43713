"""The CPU backend: decodes read the cache in place (the Numba kernel of `numba_kernels.py`), prefills go through PyTorch's
fused attention (`sdpa.py`). Lab 04 measures it against `reference.py`.

Measured in one run on 2 cores, bfloat16, 32 sequences of 230 tokens, 30 layers of 9 query and 3 kv heads of 64: gathering the
blocks and calling SDPA takes 4.2 times as long as this kernel, a plain Numba loop over the block table 2.1 times. Reading the
cache once at the memory's speed would take about half its time.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from minivllm.attention.interface import AttentionBackend
from minivllm.attention.reference import paged_decode as reference_decode
from minivllm.attention.reference import write_kv
from minivllm.attention.sdpa import paged_prefill

logger = logging.getLogger("minivllm")

NO_WINDOW = 1 << 62
WORK_PER_THREAD = 1 << 18  # tokens * heads * head_dim: some 40 microseconds
_one_at_a_time = threading.Lock()


@functools.cache
def _numba() -> Any:
    """The numba module, ready for parallel kernels, or None where it cannot be had."""
    try:
        import numba
    except ImportError as error:  # not there, or there beside a NumPy it was not made for
        logger.warning("Decode attention takes the slow PyTorch way (%s). To fix: pip install numba", error)
        return None
    _share_openmp_runtime()
    if not {"NUMBA_THREADING_LAYER", "NUMBA_THREADING_LAYER_PRIORITY"} & os.environ.keys():
        numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]
    num_threads = torch.get_num_threads()
    numba.get_num_threads()  # starts its threads now: that sets the count of the OpenMP they share, and so torch's
    torch.set_num_threads(num_threads)
    return numba


def _share_openmp_runtime() -> None:
    """Let Numba's OpenMP threads be torch's. Both bring GNU OpenMP, and two copies of it mean two pools whose idle threads spin
    while the other pool works (matrix products beside the kernel take twice as long on 2 cores). The copy torch has loaded is
    put first in the search for symbols; Numba's threading layer, loaded later, then finds its functions there."""
    if sys.platform != "linux":
        return
    for library in Path(torch.__file__).parent.glob("lib/libgomp*.so*"):
        try:
            ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_GLOBAL)
        except OSError:  # not the one torch uses here: nothing to share
            continue


@torch.library.custom_op("minivllm::cpu_paged_decode", mutates_args=(), device_types="cpu")
def _cpu_paged_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    from minivllm.attention.numba_kernels import paged_decode_kernel

    numba = _numba()
    kernel = paged_decode_kernel(q.shape[-1], kv_cache.dtype == torch.bfloat16)
    words = kv_cache.view(torch.uint32 if kv_cache.dtype == torch.bfloat16 else torch.float32).view(-1)
    out = torch.zeros(q.shape, dtype=torch.float32)  # a padding row (seq_len 0) comes out as zeros
    work = int(seq_lens.numpy().sum()) * q[0].numel()
    # torch's number of threads is the number of physical cores. Waking one takes longer than a short sequence.
    num_threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS, 1 + work // WORK_PER_THREAD)
    arguments = (
        q.float().contiguous().numpy(),
        words.numpy(),
        block_tables.contiguous().numpy(),
        seq_lens.contiguous().numpy(),
        out.numpy(),
        scale,
        window,
        kv_cache.shape[2],
        kv_cache.shape[3],
        num_threads,
    )
    # Numba's last resort, its "workqueue" layer, aborts the process when two threads enter it.
    with _one_at_a_time:
        numba.set_num_threads(num_threads)
        kernel(*arguments)
    return out.to(q.dtype)


@_cpu_paged_decode.register_fake
def _(
    q: torch.Tensor, kv_cache: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def paged_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """As `reference.paged_decode`, without copying a block. The cache must be contiguous, bfloat16 or float32."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    window = NO_WINDOW if sliding_window is None else sliding_window
    out: torch.Tensor = _cpu_paged_decode(q, kv_cache, block_tables, seq_lens, scale, window)
    return out


def cpu_backend(dtype: torch.dtype) -> AttentionBackend:
    """The backend for a model of this dtype. Where the kernel cannot serve (no Numba, float16), decodes take the reference's
    way."""
    decode = paged_decode
    if _numba() is None:
        decode = reference_decode
    elif dtype not in (torch.bfloat16, torch.float32):
        logger.info("dtype=%s: decode attention takes the slow PyTorch way; bfloat16 and float32 have a kernel.", dtype)
        decode = reference_decode
    return AttentionBackend(name="cpu", write_kv=write_kv, decode=decode, prefill=paged_prefill)
