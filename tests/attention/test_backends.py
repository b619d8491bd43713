"""Every attention backend against attention computed from its definition in float64, over the paged layout."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from minivllm.attention import get_backend, gpu, reference, sdpa
from minivllm.attention.interface import AttentionBackend, AttentionMetadata, paged_attention
from minivllm.attention.naive import causal_attention

BACKENDS = ("naive", "reference", "cpu")
# (query heads, kv heads, head_dim, dtype): GQA groups 1, 3 and 4
SHAPES = (
    (2, 2, 64, torch.float32),
    (9, 3, 64, torch.bfloat16),
    (4, 1, 80, torch.float32),
    (8, 2, 128, torch.bfloat16),
)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass
class Batch:
    """A step over a cache whose every unused slot, null block included, holds NaN or infinity."""

    q: torch.Tensor
    k: torch.Tensor  # this step's keys and values, flat like q
    v: torch.Tensor
    cache: torch.Tensor
    meta: AttentionMetadata
    histories: list[tuple[torch.Tensor, torch.Tensor]]  # what each request has, in order


def make_batch(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    block_size: int,
    seed: int = 0,
) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num_blocks = [-(-n // block_size) for n in seq_lens]
    cache = torch.full((2, 1 + sum(num_blocks), block_size, kv_heads, head_dim), float("nan"), dtype=dtype)
    cache[:, :, 1::2] = float("inf")
    free = (1 + torch.randperm(sum(num_blocks), generator=generator)).tolist()
    block_tables = torch.zeros(len(seq_lens), max(num_blocks) + 1, dtype=torch.int32)  # one column more than anyone needs
    histories, q, k, v, slots = [], [], [], [], []
    for i, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        blocks = [free.pop() for _ in range(num_blocks[i])]
        block_tables[i, : len(blocks)] = torch.tensor(blocks)
        keys, values = randn(seq_len, kv_heads, head_dim), randn(seq_len, kv_heads, head_dim)
        histories.append((keys, values))
        for position in range(seq_len):
            slot = blocks[position // block_size] * block_size + position % block_size
            if position < seq_len - query_len:
                cache[0, slot // block_size, slot % block_size] = keys[position]
                cache[1, slot // block_size, slot % block_size] = values[position]
            else:
                slots.append(slot)
        q.append(randn(query_len, heads, head_dim))
        k.append(keys[seq_len - query_len :])
        v.append(values[seq_len - query_len :])
    query_start_loc = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    meta = AttentionMetadata(
        num_decodes=sum(n == 1 for n in query_lens),
        num_tokens=sum(query_lens),
        query_start_loc=query_start_loc,
        seq_lens=lens,
        block_tables=block_tables,
        slot_mapping=torch.tensor(slots),
    )
    return Batch(torch.cat(q), torch.cat(k), torch.cat(v), cache, meta, histories)


def attention_float64(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> torch.Tensor:
    """The definition, one query and one head at a time."""
    T, heads, head_dim = q.shape
    S, kv_heads, _ = keys.shape
    out = torch.empty(T, heads, head_dim, dtype=torch.float64)
    for t in range(T):
        last = S - T + t
        first = 0 if window is None else max(0, last - window + 1)
        for h in range(heads):
            kv_head = h // (heads // kv_heads)
            scores = keys[first : last + 1, kv_head].double() @ q[t, h].double() / math.sqrt(head_dim)
            out[t, h] = scores.softmax(0) @ values[first : last + 1, kv_head].double()
    return out


def expected(batch: Batch, window: int | None = None) -> torch.Tensor:
    starts = batch.meta.query_start_loc.tolist()
    return torch.cat(
        [attention_float64(batch.q[starts[i] : starts[i + 1]], k, v, window) for i, (k, v) in enumerate(batch.histories)]
    )


def run(backend: AttentionBackend, batch: Batch, window: int | None = None) -> torch.Tensor:
    return paged_attention(
        backend,
        batch.q,
        batch.k,
        batch.v,
        batch.cache,
        batch.meta,
        scale=batch.q.shape[-1] ** -0.5,
        sliding_window=window,
    )


def shape_id(shape: tuple[int, int, int, torch.dtype]) -> str:
    return f"{shape[0]}over{shape[1]}-d{shape[2]}-{str(shape[3]).removeprefix('torch.')}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("block_size", [4, 16])
def test_mixed_batch_equals_the_definition(backend: str, shape: tuple, window: int | None, block_size: int) -> None:
    heads, kv_heads, head_dim, dtype = shape
    batch = make_batch(
        [
            1,
            1,
            1,
            1,
            1,
            7,
            3,
            16,
        ],  # five decodes, a whole prompt, a chunk that ends at a block's edge, a chunk over several blocks
        [1, 15, 16, 17, 33, 7, 16, 37],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        block_size=block_size,
    )
    out = run(get_backend(backend, "cpu", dtype), batch, window)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected(batch, window), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seq_len", [1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65])
def test_decode_at_every_length_around_a_block_edge(backend: str, seq_len: int) -> None:
    """One sequence alone: the kernel splits it by kv heads."""
    batch = make_batch([1], [seq_len], heads=9, kv_heads=3, head_dim=64, dtype=torch.bfloat16, block_size=4)
    out = run(get_backend(backend, "cpu", torch.bfloat16), batch)
    torch.testing.assert_close(out.double(), expected(batch), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 3, 5])
def test_block_sizes_that_are_no_power_of_two(backend: str, block_size: int) -> None:
    batch = make_batch([1, 1, 4], [11, 6, 9], heads=2, kv_heads=2, head_dim=64, dtype=torch.float32, block_size=block_size)
    out = run(get_backend(backend, "cpu", torch.float32), batch, 4)
    torch.testing.assert_close(out.double(), expected(batch, 4), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [1, 3, 4, 9, 100])
def test_windows_shorter_and_longer_than_the_sequence(backend: str, window: int) -> None:
    batch = make_batch([1, 9, 5], [9, 9, 12], heads=2, kv_heads=2, head_dim=64, dtype=torch.float32, block_size=4)
    out = run(get_backend(backend, "cpu", torch.float32), batch, window)
    torch.testing.assert_close(out.double(), expected(batch, window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["naive", "cpu"])  # the reference sums over its batch's padding
def test_a_row_does_not_depend_on_its_neighbours(backend: str) -> None:
    """Bit for bit, in a batch of decodes: alone (split by heads), and among others (whole sequences)."""
    shape = {"heads": 9, "kv_heads": 3, "head_dim": 64, "dtype": torch.bfloat16, "block_size": 4}
    many = make_batch([1] * 12, [5, 9, 16, 3, 40, 8, 8, 7, 21, 2, 30, 11], **shape)
    attention = get_backend(backend, "cpu", torch.bfloat16)
    together = run(attention, many)
    for i in range(12):
        alone = attention.decode(
            many.q[i : i + 1], many.cache, many.meta.block_tables[i : i + 1], many.meta.seq_lens[i : i + 1], scale=0.125
        )
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("poisoned", ["q", "k", "v"])
def test_nan_in_one_request_stays_there_and_stays_nan(backend: str, poisoned: str) -> None:
    batch = make_batch([1, 1, 1], [6, 9, 4], heads=2, kv_heads=2, head_dim=64, dtype=torch.float32, block_size=4)
    getattr(batch, poisoned)[1] = float("nan")
    out = run(get_backend(backend, "cpu", torch.float32), batch)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_do_not_overflow(backend: str) -> None:
    batch = make_batch([1, 3], [9, 7], heads=2, kv_heads=2, head_dim=64, dtype=torch.float32, block_size=4)
    batch.q *= 1e3
    out = run(get_backend(backend, "cpu", torch.float32), batch)
    torch.testing.assert_close(out.double(), expected(batch), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_touch_only_their_slots(backend: str) -> None:
    cache = torch.zeros(2, 4, 4, 2, 8)
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    get_backend(backend, "cpu", torch.float32).write_kv(key, value, cache, torch.tensor([5, 15, 6]))
    for token, slot in enumerate((5, 15, 6)):
        assert torch.equal(cache[0, slot // 4, slot % 4], key[token])
        assert torch.equal(cache[1, slot // 4, slot % 4], value[token])
        cache[:, slot // 4, slot % 4] = 0
    assert not cache.any()


def test_causal_attention_defaults_to_the_usual_scale() -> None:
    q, k, v = torch.randn(3, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    torch.testing.assert_close(causal_attention(q, k, v).double(), attention_float64(q, k, v, None), atol=1e-5, rtol=1e-5)


def test_auto_on_a_gpu_without_triton_prefills_through_pytorchs_fused_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "why_not", lambda *_: "needs Triton, which is not installed.")
    backend = get_backend("auto", "cuda", torch.float16)
    assert backend.prefill is sdpa.paged_prefill
    assert backend.decode is reference.paged_decode


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], *programs: str) -> None:
    monkeypatch.setattr(gpu.torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(gpu.torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(gpu.shutil, "which", lambda name: name if name in programs else None)
    monkeypatch.delenv("CC", raising=False)


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
def test_auto_takes_pytorchs_prefill_where_triton_has_no_matrix_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, (7, 5), "gcc")
    backend = get_backend("auto", "cuda", torch.float16)
    assert (backend.name, backend.decode) == ("triton, fused prefill", gpu.paged_decode) and backend.is_capturable
    assert backend.prefill is sdpa.paged_prefill
    pretend_gpu(monkeypatch, (8, 0), "clang")
    assert get_backend("auto", "cuda", torch.float16) is gpu.TRITON


@needs_triton
def test_without_what_triton_builds_with_the_reason_and_the_fix_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend_gpu(monkeypatch, (8, 0))
    with pytest.raises(ValueError, match=r"needs a C compiler.* apt install gcc.* Use attention_backend='auto'"):
        get_backend("triton", "cuda", torch.float16)
    monkeypatch.setenv("CC", "/opt/cc")
    monkeypatch.setattr(gpu.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(ValueError, match=r"needs Python's headers.* has no Python\.h.* apt install python3-dev"):
        get_backend("triton", "cuda", torch.float16)
    assert get_backend("auto", "cuda", torch.float16).decode is reference.paged_decode


@needs_triton
def test_one_prefill_kernel_serves_arrays_that_begin_anywhere() -> None:
    """Behind a batch's decodes their alignment depends on how many these are."""
    from minivllm.attention.triton_kernels import prefill_kernel

    loose = {p.name for p in prefill_kernel.params if p.do_not_specialize_on_alignment}
    assert loose == {"query_start_loc", "block_tables", "seq_lens"}


def test_unknown_backends_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="attention_backend='flash'"):
        get_backend("flash", "cpu", torch.float32)
    with pytest.raises(ValueError, match="attention_backend='cpu' does not run on device 'cuda'"):
        get_backend("cpu", "cuda", torch.float32)
