"""What the machine is: which device, which dtype is fast on it, how many cores and how much memory this process may use. Labs:
built by none. May not know the model, nor the engine's settings beyond their names in messages.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from minivllm.core.step import ExecutorDeadError

logger = logging.getLogger("minivllm")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CGROUP = Path("/sys/fs/cgroup")
PROCESS = Path("/proc/self")
UNKNOWN_RAM = 4 << 30


@contextlib.contextmanager
def device_errors() -> Iterator[None]:
    """A decorator. Errors after which CUDA refuses every call, such as an illegal memory access or a failed assertion in a
    kernel (but not a launch that found no memory), become ExecutorDeadError."""
    try:
        yield
    except torch.AcceleratorError as error:
        if _answers():
            raise
        raise ExecutorDeadError(f"The GPU computes nothing for this process any more: {error}") from error


def _answers() -> bool:
    try:
        torch.cuda.synchronize()
    except Exception:  # the same error again, as for every call from now on
        return False
    return True


def choose_device(name: str) -> torch.device:
    """ "auto" is the GPU if torch sees one. Raises ValueError for "cuda" where it does not."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ValueError(
            "device='cuda' needs an NVIDIA GPU and a CUDA build of torch, and torch sees none"
            f" (torch {torch.__version__}). Use device='cpu', or device='auto'."
        )
    return torch.device("cuda" if name == "cuda" or (name == "auto" and has_cuda) else "cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto": on a GPU bfloat16 where it is native (compute capability 8.0), else float16; on a CPU what multiplies faster.
    Raises ValueError for bfloat16 on a GPU that has it in software only."""
    if device.type == "cpu":
        return fastest_cpu_dtype() if name == "auto" else DTYPES[name]
    major, minor = torch.cuda.get_device_capability(device)
    if name == "auto":
        return torch.bfloat16 if major >= 8 else torch.float16
    if name == "bfloat16" and major < 8:
        raise ValueError(
            f"dtype='bfloat16' needs a GPU of compute capability 8.0 or more; {torch.cuda.get_device_name(device)} has"
            f" {major}.{minor}. Use dtype='float16', or dtype='auto'."
        )
    return DTYPES[name]


@functools.cache
def fastest_cpu_dtype() -> torch.dtype:
    """bfloat16 or float32, whichever multiplies a small batch by a 1024 x 1024 matrix faster: with AMX bfloat16 is 6 times
    faster, without any support of the processor it is many times slower. Some 50 ms, once per process."""
    seconds = {torch.float32: math.inf, torch.bfloat16: math.inf}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine threads wait for one another: that would be measured, not the dtype
    try:
        for _ in range(4):  # in turns: a disturbed moment must not decide
            for dtype in seconds:
                seconds[dtype] = min(seconds[dtype], _matmul_seconds(dtype))
    finally:
        torch.set_num_threads(num_threads)
    return min(seconds, key=lambda dtype: seconds[dtype])


def _matmul_seconds(dtype: torch.dtype) -> float:
    with torch.inference_mode():
        x, weight = torch.ones(32, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        best = math.inf
        for _ in range(8):  # the first ones warm up; the best is the least disturbed
            start = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            best = min(best, time.perf_counter() - start)
    return best


def limit_threads() -> None:
    """Keep torch from starting more threads than this process may run at once: torch counts the machine's cores, and in a
    container that may use 2 of 64, threads that wait for each other's turn make every operation slower."""
    cores = usable_cores()
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > cores:
        logger.info("torch threads: %d -> %d, the cores this process may use.", torch.get_num_threads(), cores)
        torch.set_num_threads(cores)


def usable_cores() -> int:
    """Cores by affinity and by the container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroups():
        quota = _words(folder / "cpu.max")  # "200000 100000": so much time of so much; or "max 100000"
        if len(quota) == 2 and quota[0].isdigit():
            cores = min(cores, math.ceil(int(quota[0]) / int(quota[1])))
    return max(1, cores)


def available_memory() -> int:
    """Bytes of RAM this process may still take, by the system's account and by its container's or batch job's."""
    available = _system_available()
    for folder in _cgroups():
        limit, usage = _words(folder / "memory.max"), _words(folder / "memory.current")
        if limit and limit[0].isdigit() and usage:  # "max" is no limit
            stat = _words(folder / "memory.stat")
            file_cache = int(stat[stat.index("inactive_file") + 1]) if "inactive_file" in stat else 0
            available = min(available, int(limit[0]) - int(usage[0]) + file_cache)  # the system drops it when asked
    return max(0, available)


def _system_available() -> int:
    words = _words(Path("/proc/meminfo"))
    if "MemAvailable:" in words:
        return int(words[words.index("MemAvailable:") + 1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # macOS tells the total only
    except (AttributeError, ValueError, OSError):
        return UNKNOWN_RAM


def _cgroups() -> list[Path]:
    """Control groups (version 2) this process is in, innermost first: each may set limits of its own. [] outside Linux."""
    own = next((word[3:] for word in _words(PROCESS / "cgroup") if word.startswith("0::/")), None)
    if own is None:
        return []
    innermost = CGROUP / own.strip("/")
    return [folder for folder in (innermost, *innermost.parents) if folder.is_relative_to(CGROUP)]


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
