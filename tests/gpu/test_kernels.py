"""The Triton kernels on a GPU, in every dtype it has, against attention computed from its definition in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from minivllm.attention import gpu
from minivllm.attention.interface import AttentionMetadata
from tests.attention.test_backends import Batch, expected, make_batch, run

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def on_gpu(batch: Batch) -> Batch:
    meta = batch.meta
    moved = AttentionMetadata(
        num_decodes=meta.num_decodes,
        num_tokens=meta.num_tokens,
        query_start_loc=meta.query_start_loc.cuda(),
        seq_lens=meta.seq_lens.cuda(),
        block_tables=meta.block_tables.cuda(),
        slot_mapping=meta.slot_mapping.cuda(),
    )
    tensors = {name: getattr(batch, name).cuda() for name in ("q", "k", "v", "cache")}
    return dataclasses.replace(batch, **tensors, meta=moved)


def skip_without(dtype: torch.dtype) -> None:
    if reason := gpu.why_not("cuda", dtype):
        pytest.skip(f"triton {reason}")


def check(query_lens: list[int], seq_lens: list[int], window: int | None = None, **shape: object) -> None:
    dtype = shape["dtype"]
    assert isinstance(dtype, torch.dtype)
    skip_without(dtype)
    batch = make_batch(query_lens, seq_lens, **shape)
    out = run(gpu.TRITON, on_gpu(batch), window).cpu()
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected(batch, window), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


# every value of everything, and in bfloat16, which only a GPU can show, more pairs; each costs some seconds of compiling
SHAPES = [(dtype, *shape) for dtype in TOLERANCE for shape in ((64, 3, 16), (80, 8, 32), (128, 1, 16))]
SHAPES += [(torch.bfloat16, *shape) for shape in ((64, 1, 32), (80, 3, 16), (128, 8, 16), (128, 3, 32))]


@pytest.mark.parametrize(("dtype", "head_dim", "group", "block_size"), SHAPES, ids=lambda value: str(value))
def test_a_mixed_batch_equals_the_definition(dtype: torch.dtype, head_dim: int, group: int, block_size: int) -> None:
    shape = {"heads": 2 * group, "kv_heads": 2, "head_dim": head_dim, "dtype": dtype, "block_size": block_size}
    check([1, 1, 1, 5, 35, 17], [1, block_size + 1, 150, 5, 50, 17], **shape)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_lengths_around_every_edge(dtype: torch.dtype) -> None:
    edges = sorted({edge + d for edge in (16, 32, 64, 128) for d in (-1, 0, 1)})
    lengths = [1] * len(edges) + edges
    check(
        lengths, [*edges, *(n + i for i, n in enumerate(edges))], heads=3, kv_heads=1, head_dim=64, dtype=dtype, block_size=16
    )


@pytest.mark.parametrize("window", [1, 16, 33, 500])
def test_windows(window: int) -> None:
    check([1, 1, 40, 33], [1, 100, 40, 90], window, heads=4, kv_heads=2, head_dim=64, dtype=torch.float32, block_size=16)


@pytest.mark.parametrize("parts", [1, 2, 7, 32])
@pytest.mark.parametrize("window", [None, 300])
def test_a_history_in_parts_is_the_whole_history(parts: int, window: int | None) -> None:
    dtype = torch.float16
    skip_without(dtype)
    from minivllm.attention import triton_kernels

    batch = make_batch([1, 1, 1], [1, 700, 1023], heads=6, kv_heads=2, head_dim=128, dtype=dtype, block_size=16)
    moved = on_gpu(batch)
    gpu.write_kv(moved.k, moved.v, moved.cache, moved.meta.slot_mapping)
    inputs = (moved.q, moved.cache, moved.meta.block_tables, moved.meta.seq_lens)
    out = triton_kernels.paged_decode(*inputs, sliding_window=window, num_parts=parts).cpu()
    torch.testing.assert_close(out.double(), expected(batch, window), atol=2e-3, rtol=2e-3)


def test_slots_beyond_32_bits_are_reached() -> None:
    """The last block of a cache of more than 2^31 numbers: offsets must be 64 bits wide."""
    dtype, block_size = torch.float16, 16
    num_blocks = 2**31 // (block_size * 8 * 128) + 2
    if torch.cuda.mem_get_info()[0] < 3 * 2 * num_blocks * block_size * 8 * 128 * 2:
        pytest.skip("needs 26 GB of free GPU memory")
    cache = torch.zeros(2, num_blocks, block_size, 8, 128, dtype=dtype, device="cuda")
    k, v, q = (torch.randn(1, 8, 128, dtype=dtype, device="cuda") for _ in range(3))
    gpu.write_kv(k, v, cache, torch.tensor([(num_blocks - 1) * block_size], device="cuda"))
    assert torch.equal(cache[0, -1, 0], k[0]) and torch.equal(cache[1, -1, 0], v[0])
    tables = torch.tensor([[num_blocks - 1]], dtype=torch.int32, device="cuda")
    out = gpu.paged_decode(q, cache, tables, torch.ones(1, dtype=torch.int32, device="cuda"))
    assert torch.equal(out, v)


def test_a_padding_row_comes_out_as_zeros() -> None:
    batch = on_gpu(make_batch([1, 1], [9, 20], heads=2, kv_heads=2, head_dim=64, dtype=torch.float16, block_size=16))
    gpu.write_kv(batch.k, batch.v, batch.cache, batch.meta.slot_mapping)
    lens = torch.tensor([0, 20], dtype=torch.int32, device="cuda")
    out = gpu.paged_decode(batch.q, batch.cache, batch.meta.block_tables, lens)
    assert not out[0].any() and out[1].isfinite().all()
