"""The Triton kernels in Triton's interpreter: the kernels' own code, run on the CPU in NumPy. float32 and float16 only: the
interpreter of Triton 3.9 multiplies bfloat16 wrongly.

Not collected by name: `test_triton.py` runs this file in a process where TRITON_INTERPRET=1 is set before Triton is imported.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.attention import reference
from minivllm.attention import triton_kernels as kernels
from minivllm.attention.triton_trace import recording
from minivllm.attention.triton_utils import tl, triton
from tests.attention.test_backends import make_batch

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
FP16, FP32 = torch.float16, torch.float32


def check(
    query_lens: list[int],
    seq_lens: list[int],
    window: int | None = None,
    parts: int | None = None,
    **shape: Any,
) -> None:
    """Write, decode and prefill as `paged_attention` does, each against the reference over the same cache."""
    batch = make_batch(query_lens, seq_lens, **shape)
    meta, dtype = batch.meta, shape["dtype"]
    written = batch.cache.clone()
    reference.write_kv(batch.k, batch.v, written, meta.slot_mapping)
    kernels.write_kv(batch.k, batch.v, batch.cache, meta.slot_mapping)
    torch.testing.assert_close(batch.cache, written, rtol=0, atol=0, equal_nan=True)
    n = meta.num_decodes
    if n:
        decodes = (batch.q[:n], written, meta.block_tables[:n], meta.seq_lens[:n])
        out = kernels.paged_decode(*decodes, sliding_window=window, num_parts=parts)
        close(out, reference.paged_decode(*decodes, sliding_window=window), dtype)
    if n < meta.num_tokens:
        prefills = (batch.q[n:], written, meta.query_start_loc[n:] - n, meta.block_tables[n:], meta.seq_lens[n:])
        out = kernels.paged_prefill(*prefills, sliding_window=window)
        close(out, reference.paged_prefill(*prefills, sliding_window=window), dtype)


def close(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(("group", "block_size", "dtype"), [(1, 16, FP32), (3, 16, FP16), (8, 32, FP16), (3, 32, FP32)])
def test_a_mixed_batch_equals_the_reference(head_dim: int, group: int, block_size: int, dtype: torch.dtype) -> None:
    """Decodes, a whole prompt, and a chunk after a prefix, over a cache whose other slots hold NaN and infinity."""
    shape = {"heads": 2 * group, "kv_heads": 2, "head_dim": head_dim, "dtype": dtype, "block_size": block_size}
    check([1, 1, 5, 35], [block_size + 1, 70, 5, 50], **shape)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("block_size", [16, 32])
def test_decodes_around_every_block_and_tile_edge(block_size: int, parts: int) -> None:
    lengths = sorted({edge + d for edge in (16, 32, 64, 128) for d in (-1, 0, 1)} | {1})
    check(
        [1] * len(lengths),
        lengths,
        parts=parts,
        heads=3,
        kv_heads=1,
        head_dim=64,
        dtype=FP16,
        block_size=block_size,
    )


@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_prompts_and_chunks_around_every_tile_edge(dtype: torch.dtype) -> None:
    """The tiles of several sequences are numbered through: one too many or too few would show at the neighbours."""
    query_lens = [15, 16, 17, 31, 32, 33, 63, 64, 65, 2]
    prefixes = [0, 1, 16, 31, 32, 0, 63, 64, 65, 127]
    seq_lens = [n + p for n, p in zip(query_lens, prefixes, strict=True)]
    check(query_lens, seq_lens, heads=2, kv_heads=1, head_dim=64, dtype=dtype, block_size=16)


@pytest.mark.parametrize("window", [1, 16, 33])
def test_windows(window: int) -> None:
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 64, "dtype": FP32, "block_size": 16}
    check([1, 1, 40, 33], [1, 100, 40, 90], window=window, **shape)
    check([1, 1], [20, 150], window=window, parts=2, **shape)


def test_block_sizes_that_are_no_power_of_two() -> None:
    check([1, 1, 4], [11, 6, 9], heads=2, kv_heads=2, head_dim=64, dtype=FP32, block_size=5)


def test_inputs_may_be_slices_of_a_packed_projection() -> None:
    """As the decoder gives them: q, k and v lie in one tensor, tokens apart from each other."""
    batch = make_batch([1, 1], [9, 20], heads=4, kv_heads=2, head_dim=64, dtype=FP32, block_size=16)
    packed = torch.cat([batch.q, batch.k, batch.v], dim=1)
    q, k, v = packed[:, :4], packed[:, 4:6], packed[:, 6:]
    assert not q.is_contiguous()
    kernels.write_kv(k, v, batch.cache, batch.meta.slot_mapping)
    out = kernels.paged_decode(q, batch.cache, batch.meta.block_tables, batch.meta.seq_lens)
    close(out, reference.paged_decode(q, batch.cache, batch.meta.block_tables, batch.meta.seq_lens), FP32)


@pytest.mark.parametrize("parts", [1, 4])
def test_a_padding_row_comes_out_as_zeros(parts: int) -> None:
    batch = make_batch([1, 1], [9, 20], heads=2, kv_heads=2, head_dim=64, dtype=FP32, block_size=16)
    kernels.write_kv(batch.k, batch.v, batch.cache, batch.meta.slot_mapping)
    lens = torch.tensor([0, 20], dtype=torch.int32)
    out = kernels.paged_decode(batch.q, batch.cache, batch.meta.block_tables, lens, num_parts=parts)
    assert not out[0].any() and out[1].isfinite().all()


@pytest.mark.parametrize("parts", [1, 2])
def test_nan_in_one_request_stays_there_and_stays_nan(parts: int) -> None:
    batch = make_batch([1, 1, 1], [6, 40, 4], heads=2, kv_heads=2, head_dim=64, dtype=FP32, block_size=16)
    batch.q[1] = float("nan")
    kernels.write_kv(batch.k, batch.v, batch.cache, batch.meta.slot_mapping)
    out = kernels.paged_decode(batch.q, batch.cache, batch.meta.block_tables, batch.meta.seq_lens, num_parts=parts)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_large_scores_do_not_overflow() -> None:
    batch = make_batch([1, 1], [9, 70], heads=2, kv_heads=2, head_dim=64, dtype=FP32, block_size=16)
    kernels.write_kv(batch.k, batch.v, batch.cache, batch.meta.slot_mapping)
    inputs = (1e3 * batch.q, batch.cache, batch.meta.block_tables, batch.meta.seq_lens)
    for parts in (1, 2):
        torch.testing.assert_close(
            kernels.paged_decode(*inputs, num_parts=parts), reference.paged_decode(*inputs), atol=1e-3, rtol=1e-3
        )


def test_combine_joins_parts_that_saw_different_scores() -> None:
    """By hand: the second part's best score is 1 higher, so its numbers count double; the last two parts saw nothing."""
    sums = torch.tensor([[[[2.0, 3.0], [4.0, 8.0], [0.0, 0.0], [0.0, 0.0]]]])
    bests = torch.tensor([[[0.0, 1.0, float("-inf"), float("-inf")]]])
    totals = torch.tensor([[[3.0, 2.0, 0.0, 0.0]]])
    out = kernels.combine(sums, bests, totals, torch.float32)
    close(out, torch.tensor([[[(2 + 2 * 4) / (3 + 2 * 2), (3 + 2 * 8) / (3 + 2 * 2)]]]), FP32)


@pytest.mark.parametrize("bests", [[200.0, -200.0], [-200.0, 200.0], [float("-inf"), 3.0], [3.0, float("-inf")]])
def test_combine_is_relative_to_the_best_part_wherever_it_is(bests: list[float]) -> None:
    """No other reference will do: 2 ** 400 is infinite, and a part that saw nothing has none."""
    sums, totals = torch.tensor([[[[2.0], [9.0]]]]), torch.tensor([[[4.0, 3.0]]])
    nothing = torch.tensor([[bests]]).isinf()
    sums[nothing], totals[nothing] = 0.0, 0.0
    out = kernels.combine(sums, torch.tensor([[bests]]), totals, torch.float32)
    close(out, torch.tensor([[[0.5 if bests[0] > bests[1] else 3.0]]]), FP32)


@pytest.mark.parametrize("parts", [2, 3, 7])
@pytest.mark.parametrize("window", [None, 40])
def test_cut_into_parts_is_what_it_is_whole(parts: int, window: int | None) -> None:
    """Parts of several tiles, of less than one, and of nothing; windows that begin inside a tile."""
    shape = {"heads": 3, "kv_heads": 1, "head_dim": 64, "dtype": FP32, "block_size": 16}
    check([1, 1, 1], [3, 65, 150], window=window, parts=parts, **shape)


def test_a_recording_has_what_each_program_loads_and_stores() -> None:
    cache, key = torch.zeros(2, 3, 4, 1, 2), torch.ones(2, 1, 2)
    with recording() as accesses:
        kernels.write_kv(key, 2 * key, cache, torch.tensor([5, 9]))
    stored = [(a.program[0], a.offsets_in(cache).tolist()) for a in accesses if a.is_store]
    assert stored == [(0, [10, 11]), (0, [24 + 10, 24 + 11]), (1, [18, 19]), (1, [24 + 18, 24 + 19])]
    loaded = [(a.program[0], a.offsets_in(key).tolist()) for a in accesses if not a.is_store and len(a.offsets_in(key))]
    assert loaded == [(0, [0, 1]), (1, [2, 3])]
    kernels.write_kv(key, key, cache, torch.tensor([4, 6]))
    assert len(accesses) == 2 * (2 + 3)  # closed: nothing is added


@triton.jit
def without_other(out, x, table, n):
    places = tl.arange(0, 4)
    numbers = tl.load(x + places, mask=places < n) + tl.load(table + places, mask=places < n, other=0)
    tl.store(out + places, numbers + tl.load(table + places, mask=places < 4))


def test_with_garbage_a_masked_number_without_other_is_nan() -> None:
    out, x, table = torch.zeros(4), torch.ones(4), torch.full((4,), 2, dtype=torch.int32)
    with recording() as plain:
        without_other[(1,)](out, x, table, 3)
    assert out.tolist() == [5, 5, 5, 2]
    with recording(garbage=True) as accesses:
        without_other[(1,)](out, x, table, 3)
    assert out[:3].tolist() == [5, 5, 5] and out[3].isnan()
    assert [a.undefined for a in accesses] == [a.undefined for a in plain] == [True, False, False, False]


@triton.jit
def with_a_number_in_its_masks(out, x, n):
    places, some = tl.arange(0, 4), n > 0
    numbers = tl.load(x + places, mask=some & (places < n), other=7.0)
    tl.store(out + places[:, None] * 2 + tl.arange(0, 2)[None, :], numbers[:, None], mask=(places < 3)[:, None] & some)
    tl.store(out + 6 + tl.arange(0, 2), numbers.sum(0) + tl.zeros([2], tl.float32), mask=some)


def test_while_recording_a_mask_may_join_a_vector_and_a_number() -> None:
    out, x = torch.zeros(8), torch.ones(4)
    with recording() as accesses:
        with_a_number_in_its_masks[(1,)](out, x, 2)
        with_a_number_in_its_masks[(1,)](out, x, 0)
    assert out.tolist() == [1, 1, 1, 1, 7, 7, 16, 16]
    assert [len(access.addresses) for access in accesses] == [2, 6, 2, 0, 0, 0]


def test_parts_are_many_for_few_long_sequences_and_one_for_many() -> None:
    h200 = kernels.Limits((9, 0), 227 << 10, 132)
    parts = {
        (programs, longest): kernels.choose_num_parts(programs, longest, 64, h200)
        for programs in (8, 64, 2048)
        for longest in (128, 4096)
    }
    assert parts == {(8, 128): 1, (8, 4096): 16, (64, 128): 1, (64, 4096): 8, (2048, 128): 1, (2048, 4096): 1}


@given(st.data())
@settings(max_examples=max(3, settings().max_examples // 15))
def test_any_batch_equals_the_reference(data: st.DataObject) -> None:
    query_lens = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4).map(sorted))
    seq_lens = [n + data.draw(st.integers(0, 70)) for n in query_lens]
    group = data.draw(st.sampled_from([1, 3, 8]))
    check(
        query_lens,
        seq_lens,
        window=data.draw(st.none() | st.integers(1, 80)),
        parts=data.draw(st.sampled_from([None, 1, 2, 7, 32])),
        heads=group,
        kv_heads=1,
        head_dim=data.draw(st.sampled_from([64, 80, 128])),
        dtype=data.draw(st.sampled_from([FP16, FP32])),
        block_size=data.draw(st.sampled_from([16, 32])),
        seed=data.draw(st.integers(0, 1000)),
    )
