"""The kernels compiled for GPUs that are not here, down to machine code: what is launched is what is compiled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton has packages for Linux only")
from minivllm.attention import triton_kernels
from minivllm.attention.triton_compile import compile_kernels, compile_launch, launches_held_back, read_launch
from minivllm.attention.triton_kernels import Limits, choose_tiles
from minivllm.attention.triton_utils import tl, triton

A100, H100, RTX_4090, T4 = (
    Limits((8, 0), 163 << 10, 108),
    Limits((9, 0), 227 << 10, 132),
    Limits((8, 9), 99 << 10, 128),
    Limits((7, 5), 64 << 10, 40),
)
CAPABILITIES = {A100: 80, H100: 90, RTX_4090: 89, T4: 75}
ALL = ("write_kv_kernel", "decode_kernel", "split_kernel", "combine_kernel", "prefill_kernel")


def every_kernel(head_dim: int, dtype: torch.dtype, block_size: int = 16) -> Callable[[], None]:
    """A call of everything, with a GQA group of 2. Nothing is run: the numbers do not matter."""

    def call() -> None:
        q = torch.zeros(4, 16, head_dim, dtype=dtype)
        cache = torch.zeros(2, 8, block_size, 8, head_dim, dtype=dtype)
        tables, lens = torch.zeros(4, 64, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
        triton_kernels.write_kv(q[:, :8], q[:, 8:], cache, torch.zeros(4, dtype=torch.int64))
        triton_kernels.paged_decode(q, cache, tables, lens, num_parts=1)
        triton_kernels.paged_decode(q, cache, tables, lens, num_parts=8)
        triton_kernels.paged_prefill(q, cache, torch.arange(5, dtype=torch.int32), tables, lens)

    return call


@pytest.mark.parametrize(
    ("gpu", "head_dim", "dtype"),
    [
        (H100, 128, torch.bfloat16),
        (A100, 80, torch.float16),
    ],
    ids=lambda value: str(CAPABILITIES.get(value, value)) if isinstance(value, Limits) else str(value),
)
def test_every_kernel_compiles_without_spilling_and_fits(
    monkeypatch: pytest.MonkeyPatch, gpu: Limits, head_dim: int, dtype: torch.dtype
) -> None:
    check_kernels(monkeypatch, gpu, head_dim, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [A100, H100, RTX_4090, T4], ids=lambda gpu: f"sm_{CAPABILITIES[gpu]}")
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_kernel_on_every_gpu(
    monkeypatch: pytest.MonkeyPatch, gpu: Limits, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    if gpu is T4 and dtype == torch.bfloat16:
        pytest.skip("sm_75 has no bfloat16")
    check_kernels(monkeypatch, gpu, head_dim, dtype, block_size)


def check_kernels(
    monkeypatch: pytest.MonkeyPatch, gpu: Limits, head_dim: int, dtype: torch.dtype, block_size: int = 16
) -> None:
    monkeypatch.setattr(triton_kernels, "limits_of", lambda device: gpu)
    kernels = compile_kernels(every_kernel(head_dim, dtype, block_size), CAPABILITIES[gpu])
    assert {kernel.name for kernel in kernels} == set(ALL)
    promised = {
        "decode_kernel": choose_tiles(16, head_dim, dtype.itemsize, gpu),
        "prefill_kernel": choose_tiles(None, head_dim, dtype.itemsize, gpu),
    }
    for kernel in kernels:
        assert 0 < kernel.registers <= 255
        assert kernel.spilled_bytes <= 8, kernel.name  # two registers: nothing one could measure
        assert kernel.shared_memory <= gpu.shared_memory
        if tiles := promised.get(kernel.name):
            assert kernel.shared_memory <= tiles.shared_memory(head_dim, dtype.itemsize, gpu), kernel.name


def test_a_spill_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles far too large for four warps: the report must not be empty talk."""
    monkeypatch.setattr(triton_kernels, "limits_of", lambda device: A100)
    monkeypatch.setattr(triton_kernels, "choose_tiles", lambda *_: triton_kernels.Tiles(128, 64, 4, 2))
    q, tables = torch.zeros(4, 2, 128, dtype=torch.float16), torch.zeros(4, 8, dtype=torch.int32)
    cache = torch.zeros(2, 8, 16, 2, 128, dtype=torch.float16)
    starts, lens = torch.arange(5, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    (kernel,) = compile_kernels(lambda: triton_kernels.paged_prefill(q, cache, starts, tables, lens), 80)
    assert kernel.spilled_bytes > 0


def test_launches_are_held_back_with_what_they_would_have_been_given() -> None:
    cache = torch.zeros(2, 4, 16, 2, 64)
    key = torch.ones(3, 2, 64)
    with launches_held_back() as launches:
        triton_kernels.write_kv(key, key, cache, torch.tensor([16, 17, 18]))
    (launch,) = launches
    assert launch.grid == (3,) and launch.options == {"num_warps": 4}
    assert launch.arguments["WIDTH"] == 128 and launch.arguments["values_start"] == 4 * 16 * 128
    assert not cache.any()
    assert "st.global" in compile_launch(launch, 80).ptx


def test_what_the_compiler_refuses_is_refused_by_its_first_stage_alone() -> None:
    """A sum that enters the loop as a number and leaves it as a vector: the interpreter takes it."""
    from triton.compiler.errors import CompilationError

    x = torch.zeros(64)
    with launches_held_back() as launches:
        changes_its_type[(1,)](x, n=2)
        keeps_its_type[(1,)](x, n=2)
    changes, keeps = launches
    with pytest.raises(CompilationError, match="at 4:"):
        read_launch(changes, 80)
    read_launch(keeps, 80)


@triton.jit
def changes_its_type(x, n: tl.constexpr):
    total = 0.0
    numbers = tl.arange(0, 16)
    for i in range(tl.program_id(0), n):
        total = total + tl.load(x + i * 16 + numbers)
    tl.store(x + numbers, total)


@triton.jit
def keeps_its_type(x, n: tl.constexpr):
    numbers = tl.arange(0, 16)
    total = tl.zeros([16], tl.float32)
    for i in range(tl.program_id(0), n):
        total = total + tl.load(x + i * 16 + numbers)
    tl.store(x + numbers, total)


def test_a_head_dim_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim=4096 in 32 bits does not fit the 64 KiB"):
        choose_tiles(None, 4096, 4, T4)


def test_importing_the_backend_costs_no_triton() -> None:
    code = "import minivllm.attention.gpu, minivllm.worker.graph_safety, sys; print('triton' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2]
    )
    assert done.stdout.strip() == "False"
