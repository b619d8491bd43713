"""What the machine may be asked for: device, dtype, cores, memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minivllm.worker import device

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: "Tesla T4")


def test_auto_is_the_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.choose_device("auto") == CPU
    on_gpu(monkeypatch, (8, 0))
    assert device.choose_device("auto") == CUDA
    assert device.choose_device("cpu") == CPU


def test_a_gpu_that_is_not_there_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device='cuda' needs an NVIDIA GPU.*device='auto'"):
        device.choose_device("cuda")


def test_auto_dtype_on_a_gpu_is_bfloat16_where_it_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, (9, 0))
    assert device.choose_dtype("auto", CUDA) is torch.bfloat16
    on_gpu(monkeypatch, (7, 5))
    assert device.choose_dtype("auto", CUDA) is torch.float16
    assert device.choose_dtype("float32", CUDA) is torch.float32


def test_bfloat16_on_an_old_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, (7, 5))
    with pytest.raises(ValueError, match=r"dtype='bfloat16' needs .* Tesla T4 has 7\.5\. Use dtype='float16'"):
        device.choose_dtype("bfloat16", CUDA)


@pytest.mark.parametrize("fast", [torch.float32, torch.bfloat16])
def test_auto_dtype_on_a_cpu_is_what_multiplies_faster(monkeypatch: pytest.MonkeyPatch, fast: torch.dtype) -> None:
    monkeypatch.setattr(device, "_matmul_seconds", lambda dtype: 1.0 if dtype is fast else 2.0)
    device.fastest_cpu_dtype.cache_clear()
    try:
        assert device.choose_dtype("auto", CPU) is fast
    finally:
        device.fastest_cpu_dtype.cache_clear()


def test_the_matmul_is_measured_once() -> None:
    device.fastest_cpu_dtype.cache_clear()
    assert device.choose_dtype("auto", CPU) is device.choose_dtype("auto", CPU)
    assert device.fastest_cpu_dtype.cache_info().misses == 1


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A batch job's control group, two levels below the root."""
    monkeypatch.setattr(device, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(device, "PROCESS", tmp_path / "process")
    folder = tmp_path / "cgroup" / "slurm" / "job_7"
    folder.mkdir(parents=True)
    (tmp_path / "process").mkdir()
    (tmp_path / "process" / "cgroup").write_text("0::/slurm/job_7\n")
    return folder


def test_memory_is_what_the_tightest_group_leaves(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_system_available", lambda: 10_000)
    assert device.available_memory() == 10_000
    (job / "memory.max").write_text("max\n")
    (job / "memory.current").write_text("100\n")
    (job.parent / "memory.max").write_text("5000\n")
    (job.parent / "memory.current").write_text("1500\n")
    assert device.available_memory() == 3500
    (job.parent / "memory.stat").write_text("anon 1000\ninactive_file 400\nfile 500\n")
    assert device.available_memory() == 3900  # file cache goes when it is asked to


def test_cores_are_what_affinity_and_quota_leave(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert device.usable_cores() == 64
    (job / "cpu.max").write_text("max 100000\n")
    (job.parent / "cpu.max").write_text("250000 100000\n")
    assert device.usable_cores() == 3


def test_torch_is_kept_from_more_threads_than_cores_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(device, "usable_cores", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    device.limit_threads()
    assert asked == []
    monkeypatch.delenv("OMP_NUM_THREADS")
    device.limit_threads()
    assert asked == [2]


def test_outside_linux_there_are_no_groups_and_memory_is_still_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "PROCESS", tmp_path / "nothing")
    assert device._cgroups() == []
    assert device.available_memory() > 0
