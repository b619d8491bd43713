"""What only the CPU backend has: a kernel that may be missing, compiled code, a custom operator, threads."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading

import pytest
import torch

from minivllm.attention import cpu, get_backend
from minivllm.attention.reference import paged_decode
from minivllm.attention.reference import write_kv as reference_write_kv

numba = pytest.importorskip("numba")


def decode_arguments(batch_size: int = 6) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    cache = torch.randn(2, 1 + 2 * batch_size, 4, 2, 64)
    block_tables = torch.arange(1, 1 + 2 * batch_size, dtype=torch.int32).view(batch_size, 2)
    return torch.randn(batch_size, 4, 64), cache, block_tables, torch.full((batch_size,), 7, dtype=torch.int32)


def test_without_numba_the_reference_decodes_and_one_line_says_what_to_install(monkeypatch, caplog) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    cpu._numba.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "minivllm"):
            backend = get_backend("auto", "cpu", torch.float32)
            get_backend("auto", "cpu", torch.float32)
    finally:
        cpu._numba.cache_clear()
    assert backend.decode is paged_decode
    assert [r.message for r in caplog.records if "pip install numba" in r.message] == [caplog.records[0].message]


def test_float16_decodes_the_reference_way() -> None:
    q, cache, tables, lens = decode_arguments()
    out = get_backend("cpu", "cpu", torch.float16).decode(q.half(), cache.half(), tables, lens, scale=0.125)
    torch.testing.assert_close(out.float(), paged_decode(q, cache, tables, lens), atol=1e-2, rtol=1e-2)


def test_the_kernel_is_an_operator_that_tracing_sees() -> None:
    q, cache, tables, lens = decode_arguments()
    operator = torch.ops.minivllm.cpu_paged_decode.default
    torch.library.opcheck(operator, (q, cache, tables, lens, 0.125, cpu.NO_WINDOW), test_utils="test_faketensor")


def test_padding_rows_come_out_as_zeros() -> None:
    q, cache, tables, lens = decode_arguments()
    lens[3:] = 0
    out = cpu.paged_decode(q, cache, tables, lens)
    assert not out[3:].any()
    torch.testing.assert_close(out[:3], paged_decode(q[:3], cache, tables[:3], lens[:3]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block_id", [-1, 13])
def test_a_block_the_cache_does_not_have_is_refused(block_id: int) -> None:
    q, cache, tables, lens = decode_arguments()  # blocks 0 to 12
    tables[2, 1] = block_id
    with pytest.raises(IndexError, match="names a block that the KV cache does not have"):
        cpu.paged_decode(q, cache, tables, lens)


def test_a_sequence_beyond_its_block_table_is_refused() -> None:
    q, cache, tables, lens = decode_arguments()
    lens[0] = 9  # two blocks of 4
    with pytest.raises(IndexError, match="longer than its block table"):
        cpu.paged_decode(q, cache, tables, lens)


@pytest.mark.parametrize("slot", [-1, 52])
def test_a_slot_the_cache_does_not_have_is_refused_and_nothing_is_written(slot: int) -> None:
    _, cache, _, _ = decode_arguments()  # 13 blocks of 4: slots 0 to 51
    before, rows = cache.clone(), torch.ones(3, 2, 64)
    with pytest.raises(IndexError, match="slot"):
        cpu.write_kv(rows, rows, cache, torch.tensor([4, 5, slot]))
    assert torch.equal(cache, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writing_and_decoding_in_one_call_is_one_after_the_other(dtype: torch.dtype) -> None:
    """As the compiled decoder asks for it. New keys and values are slices of wider rows, as a packed projection gives them; not
    of equally wide ones, lest one's step pass for the other's."""
    q, cache, tables, lens = (t.to(dtype) if t.is_floating_point() else t for t in decode_arguments())
    qkv = torch.randn(6, 8, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    wider = torch.randn(6, 12, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    key, value, slots = qkv[:, 4:6], wider[:, 3:5], tables[:, 1].long() * 4 + 2  # the seventh token's
    expected_cache = cache.clone()
    reference_write_kv(key, value, expected_cache, slots)
    expected = cpu.paged_decode(q, expected_cache, tables, lens)
    starts = torch.arange(7, dtype=torch.int32)
    arguments = (q, key, value, cache, starts, lens, tables, slots, 64**-0.5, cpu.NO_WINDOW)
    assert torch.equal(torch.ops.minivllm.cpu_attention(*arguments), expected)
    assert torch.equal(cache, expected_cache)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("window", [cpu.NO_WINDOW, 9])
def test_however_the_tokens_are_cut_between_workers_the_result_is_the_same(num_workers: int, window: int) -> None:
    """Sequences are cut where a worker's share ends, into two pieces or more, which are then combined; here by hand, for so few
    tokens are never cut by the backend. Scores are spread widely, so that the pieces' largest ones differ."""
    from minivllm.attention.numba_kernels import paged_decode_kernel

    lengths = [1, 70, 3, 26, 0, 33]
    cache = torch.randn(2, 40, 4, 2, 64, generator=torch.Generator().manual_seed(0))
    q = 4 * torch.randn(len(lengths), 4, 64, generator=torch.Generator().manual_seed(1))
    tables = torch.randperm(40, generator=torch.Generator().manual_seed(2))[:18].int().repeat(len(lengths), 1)
    lens = torch.tensor(lengths, dtype=torch.int32)
    out = torch.empty_like(q)
    arrays = q.data_ptr(), q.stride(0), cache.data_ptr(), cache.numel(), tables.data_ptr(), tables.shape[1], lens.data_ptr()
    shape, nothing_new = (len(lens), 0.125, window, 4, 2), (0,) * 6
    paged_decode_kernel(64, 2, False)(*arrays, out.data_ptr(), *shape, num_workers, *nothing_new)
    expected = paged_decode(q, cache, tables, lens, sliding_window=None if window == cpu.NO_WINDOW else window)
    torch.testing.assert_close(out, torch.where(lens[:, None, None] > 0, expected, 0.0), atol=1e-5, rtol=1e-5)


def test_queries_need_not_be_contiguous() -> None:
    q, cache, tables, lens = decode_arguments()
    wide = torch.randn(6, 10, 64)
    wide[:, 3:7] = q
    torch.testing.assert_close(cpu.paged_decode(wide[:, 3:7], cache, tables, lens), paged_decode(q, cache, tables, lens))


def test_two_threads_may_decode_at_once() -> None:
    q, cache, tables, lens = decode_arguments()
    expected = paged_decode(q, cache, tables, lens)
    results: list[torch.Tensor] = []
    threads = [
        threading.Thread(target=lambda: results.extend(cpu.paged_decode(q, cache, tables, lens) for _ in range(20)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 60
    for result in results:
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_a_process_finds_the_compiled_kernel_in_the_cache() -> None:
    cpu.paged_decode(*decode_arguments())  # makes sure that it was compiled once
    code = (
        "import torch\n"
        "from minivllm.attention import cpu\n"
        "from minivllm.attention.numba_kernels import paged_decode_kernel\n"
        "cache, tables = torch.zeros(2, 3, 4, 2, 64), torch.ones(1, 1, dtype=torch.int32)\n"
        "cpu.paged_decode(torch.zeros(1, 4, 64), cache, tables, torch.ones(1, dtype=torch.int32))\n"
        "stats = paged_decode_kernel(64, 2, False).stats\n"
        "assert stats.cache_hits and not stats.cache_misses, stats\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_torch_keeps_its_number_of_threads() -> None:
    """Numba's threads are OpenMP's, as torch's are. (In a process of its own: Numba starts them once.)"""
    code = (
        "import torch\n"
        "from minivllm.attention import get_backend\n"
        "decode = get_backend('cpu', 'cpu', torch.float32).decode\n"
        "cache, tables = torch.zeros(2, 3, 4, 2, 64), torch.ones(1, 1, dtype=torch.int32)\n"
        "decode(torch.zeros(1, 4, 64), cache, tables, torch.ones(1, dtype=torch.int32))\n"
        "assert torch.get_num_threads() == 1, torch.get_num_threads()\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)


def test_a_read_only_install_without_a_home_still_compiles(monkeypatch) -> None:
    from minivllm.attention import numba_kernels

    asked = []

    def njit(signature: object, cache: bool = False, **options: object):
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function 'kernel': no locator available")
        return lambda function: function

    monkeypatch.setattr(numba_kernels, "njit", njit)
    assert numba_kernels._compiled(decode_arguments, signature=None, parallel=True) is decode_arguments
    assert asked == [True, False]
