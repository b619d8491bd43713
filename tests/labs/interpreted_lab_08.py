"""The student's kernels, as Lab 08's solution has them, in Triton's interpreter: decode, split decode and prefill through
my_engine's file, whose every attention kernel calls the student's `attend`.

Not collected by name: `test_lab_08_plugs_in.py` runs this file in a process where TRITON_INTERPRET=1 is set before Triton is
imported, with a student's folder in which the solution has passed.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from checks.student.engine import components
from checks.student.kernels import my_kernels, touched
from minivllm.attention import reference
from tests.attention.test_backends import Batch, make_batch

SHAPE = {"heads": 6, "kv_heads": 2, "head_dim": 20, "dtype": torch.float32, "block_size": 4}


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return my_kernels()


@pytest.fixture
def batch(kernels: ModuleType) -> Batch:
    made = make_batch([1, 1, 1, 5], [9, 1, 150, 12], **SHAPE)
    reference.write_kv(made.k, made.v, made.cache, made.meta.slot_mapping)
    return made


def test_the_engine_takes_them(kernels: ModuleType) -> None:
    assert kernels.__name__.endswith("my_engine.attention.triton_kernels")
    assert components()["attention.decode"].__module__ == kernels.__name__


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("parts", [1, 3])
def test_decode_equals_the_reference_whole_and_cut_into_parts(
    kernels: ModuleType, batch: Batch, parts: int, window: int | None
) -> None:
    inputs = batch.q[:3], batch.cache, batch.meta.block_tables[:3], batch.meta.seq_lens[:3]
    out = kernels.paged_decode(*inputs, num_parts=parts, sliding_window=window)
    torch.testing.assert_close(out, reference.paged_decode(*inputs, sliding_window=window), atol=1e-5, rtol=1e-5)


def test_prefill_uses_the_same_walk(kernels: ModuleType, batch: Batch) -> None:
    starts = batch.meta.query_start_loc[3:] - 3
    inputs = batch.q[3:], batch.cache, starts, batch.meta.block_tables[3:], batch.meta.seq_lens[3:]
    out = kernels.paged_prefill(*inputs)
    torch.testing.assert_close(out, reference.paged_prefill(*inputs), atol=1e-5, rtol=1e-5)


def test_the_map_has_each_key_and_value_once_and_nothing_else() -> None:
    seen = touched([[5, 2, 7], [3]], [9, 3], block_size=4, kv_heads=2, group=3, head_dim=16, tile=8)
    assert (
        seen["programs"] == 4 and seen["most_reads"] == 1 and seen["read_bytes"] == seen["cache_bytes"] == 2 * 12 * 2 * 16 * 2
    )
    slots = [5 * 4, 5 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3, 2 * 4, 2 * 4 + 1, 2 * 4 + 2, 2 * 4 + 3, 7 * 4]
    for head in (0, 1):
        for part in (0, 1):
            first = [(slot, tile) for sequence, h, p, slot, tile in seen["reads"] if (sequence, h, p) == (0, head, part)]
            assert sorted(first) == sorted((slot, 0 if i < 8 else 1) for i, slot in enumerate(slots))
    assert {slot for sequence, _, _, slot, _ in seen["reads"] if sequence == 1} == {12, 13, 14}
