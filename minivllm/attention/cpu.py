"""The CPU backend: decodes read the cache in place (the Numba kernel of `numba_kernels.py`), prefills go through PyTorch's
fused attention (`sdpa.py`). Lab 04 measures it against `reference.py`.

On 2 cores of a Xeon with AMX (reading 24 GB/s), bfloat16, 30 layers of 9 query and 3 kv heads of 64, a decode step's attention
takes 12 to 15 ms for 32 sequences of 190 tokens: 2 to 2.5 times what reading the cache once would. For one sequence most of the
time is the way into the kernel, so a decode step writes and attends in one call (1.2 ms a step; two calls took 2.8).

The kernels are torch operators, so that whatever traces a step sees them; `minivllm::cpu_attention` is a whole layer's
attention, for the compiled decoder. They are registered by hand: `torch.library.custom_op` would add its own Python to every
call, of which a step makes one a layer.
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

from minivllm.attention.interface import AttentionBackend, AttentionMetadata, paged_attention
from minivllm.attention.reference import paged_decode as reference_decode
from minivllm.attention.reference import write_kv as reference_write_kv
from minivllm.attention.sdpa import paged_prefill

logger = logging.getLogger("minivllm")

NO_WINDOW = 1 << 62
WORK_PER_THREAD = 1 << 18  # tokens * heads * head_dim: some 20 microseconds
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


_operators = torch.library.Library("minivllm", "FRAGMENT")
_operators.define("cpu_write_kv(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor slot_mapping) -> ()")
_operators.define(
    "cpu_paged_decode(Tensor q, Tensor kv_cache, Tensor block_tables, Tensor seq_lens, float scale, int window) -> Tensor"
)
_operators.define(
    "cpu_attention(Tensor q, Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor query_start_loc, Tensor seq_lens,"
    " Tensor block_tables, Tensor slot_mapping, float scale, int window) -> Tensor"
)


def _write_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    from minivllm.attention.numba_kernels import write_kv_kernel

    per_word = 4 // key.element_size()
    key, value, slots = _dense_rows(key), _dense_rows(value), slot_mapping.contiguous()
    write_kv_kernel(kv_cache.dtype == torch.bfloat16)(
        key.data_ptr(),
        key.stride(0) // per_word,
        value.data_ptr(),
        value.stride(0) // per_word,
        kv_cache.data_ptr(),
        kv_cache.numel() // per_word,
        slots.data_ptr(),
        key.shape[0],
        key.shape[1] * key.shape[2] // per_word,
    )


def _paged_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    return _decode(q, kv_cache, block_tables, seq_lens, scale, window, (0,) * 6)


def _write_and_decode(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
) -> torch.Tensor:
    """Both in one call: of a short sequence's time most would be the way into a second one."""
    per_word = 4 // key.element_size()
    key, value, slots = _dense_rows(key), _dense_rows(value), slots.contiguous()
    addresses = key.data_ptr(), key.stride(0) // per_word, value.data_ptr(), value.stride(0) // per_word, slots.data_ptr()
    return _decode(q, kv_cache, block_tables, seq_lens, scale, window, (len(slots), *addresses))


def _decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    new: tuple[int, ...],
) -> torch.Tensor:
    """`new`: the kernel's last arguments, the tokens that it writes before."""
    from minivllm.attention.numba_kernels import paged_decode_kernel

    numba = _numba()
    num_seqs, num_heads, head_dim = q.shape
    _, _, block_size, num_kv_heads, _ = kv_cache.shape
    kernel = paged_decode_kernel(head_dim, num_heads // num_kv_heads, kv_cache.dtype is torch.bfloat16)
    q, tables, lengths = _dense_rows(q), block_tables.int().contiguous(), seq_lens.int().contiguous()
    out = torch.empty((num_seqs, num_heads, head_dim), dtype=q.dtype)
    # At most: tables are as wide as the longest sequence needs. Waking a thread takes longer than a short sequence.
    work = num_seqs * tables.shape[1] * block_size * num_heads * head_dim
    # torch's number of threads is the number of physical cores.
    num_threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS, 1 + work // WORK_PER_THREAD)
    arguments = (
        q.data_ptr(),
        q.stride(0),
        kv_cache.data_ptr(),
        kv_cache.numel() * kv_cache.element_size() // 4,
        tables.data_ptr(),
        tables.shape[1],
        lengths.data_ptr(),
        out.data_ptr(),
        num_seqs,
        scale,
        window,
        block_size,
        num_kv_heads,
        num_threads,
        *new,
    )
    with _one_at_a_time:  # Numba's last resort, its "workqueue" layer, aborts the process when two threads enter it
        numba.set_num_threads(num_threads)
        kernel(*arguments)
    return out


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] whose rows, each of 4-byte words without a gap, may lie apart: as slices of a packed projection do."""
    _, heads, head_dim = x.shape
    stride, of_heads, of_elements = x.stride()
    rows_are_dense = of_elements == 1 and of_heads == head_dim and stride >= heads * head_dim
    return x if rows_are_dense and stride % 2 == 0 else x.contiguous()


def _attention(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    slot_mapping: torch.Tensor,
    scale: float,
    window: int,
) -> torch.Tensor:
    """`paged_attention` of this backend, with the batch's shape in tensors alone: what a traced graph can pass on."""
    if len(seq_lens) == len(q) and _numba() is not None:  # decodes alone, the usual step: its kernels take no longer than glue
        return _write_and_decode(q, key, value, kv_cache, slot_mapping, block_tables, seq_lens, scale, window)
    starts, num_tokens = query_start_loc.numpy(), len(q)
    meta = AttentionMetadata(
        num_decodes=int((starts[1:] - starts[:-1] == 1).sum()),
        num_tokens=num_tokens,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_tables=block_tables,
        slot_mapping=slot_mapping,
    )
    sliding_window = None if window == NO_WINDOW else window
    backend = _backend_of(q.dtype)
    return paged_attention(backend, q, key, value, kv_cache, meta, scale=scale, sliding_window=sliding_window)


_operators.impl("cpu_write_kv", _write_kv, "CPU")
_operators.impl("cpu_paged_decode", _paged_decode, "CPU")
_operators.impl("cpu_attention", _attention, "CPU")
torch.library.register_fake("minivllm::cpu_write_kv", lambda *arguments: None, lib=_operators)
for _name in ("cpu_paged_decode", "cpu_attention"):
    torch.library.register_fake(f"minivllm::{_name}", lambda q, *arguments: q.new_empty(q.shape), lib=_operators)


def write_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """As `reference.write_kv`. The cache must be contiguous, bfloat16 or float32."""
    torch.ops.minivllm.cpu_write_kv(key, value, kv_cache, slot_mapping)


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
    out: torch.Tensor = torch.ops.minivllm.cpu_paged_decode(q, kv_cache, block_tables, seq_lens, scale, window)
    return out


def cpu_backend(dtype: torch.dtype) -> AttentionBackend:
    """The backend for a model of this dtype. Where no kernel can serve (no Numba, float16) it takes the reference's way."""
    has_kernels = _numba() is not None
    if has_kernels and dtype not in (torch.bfloat16, torch.float32):
        logger.info("dtype=%s: decode attention takes the slow PyTorch way; bfloat16 and float32 have a kernel.", dtype)
        has_kernels = False
    if not has_kernels:
        return AttentionBackend("cpu", write_kv=reference_write_kv, decode=reference_decode, prefill=paged_prefill)
    return AttentionBackend("cpu", write_kv=write_kv, decode=paged_decode, prefill=paged_prefill)


_backend_of = functools.cache(cpu_backend)
