"""Device: the three numbers of a machine that decide how fast a step can be, measured or looked up. Lab 00 measures them.

Measured ceilings are what plain PyTorch reaches on this machine, not what a data sheet promises: they are what an engine can be
held to. Importing this does not import torch; measuring does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """flops: floating-point operations a second, in the dtype of interest.   bandwidth: bytes a second from memory.
    launch_overhead: seconds to start one operation."""

    name: str
    flops: float
    bandwidth: float
    launch_overhead: float

    @property
    def ridge(self) -> float:
        """Operations per byte at which memory and arithmetic take equally long: below it a step waits for memory."""
        return self.flops / self.bandwidth


# Data sheets (dense bf16, HBM), for planning; the launch overhead is what an eager PyTorch operation commonly takes.
DATA_SHEETS = {
    d.name: d
    for d in (
        Device("A100-80GB", 312e12, 2.04e12, 5e-6),
        Device("H100-SXM", 989e12, 3.35e12, 5e-6),
        Device("H200", 989e12, 4.8e12, 5e-6),
        Device("L4", 121e12, 0.30e12, 5e-6),
        Device("T4", 65e12, 0.32e12, 5e-6),
    )
}


def best_time(run: Callable[[], object], seconds: float = 0.3) -> float:
    """Seconds of the fastest of the runs that fit into `seconds` (two at least), after one to warm up. The fastest, because
    whatever else the machine does can only make a run slower. Waits for the GPU where there is one."""
    import torch

    sync = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    run()
    sync()
    best, runs, stop = float("inf"), 0, time.perf_counter() + seconds
    while runs < 2 or time.perf_counter() < stop:
        begin = time.perf_counter()
        run()
        sync()
        best, runs = min(best, time.perf_counter() - begin), runs + 1
    return best


@dataclass(frozen=True)
class Work:
    """What a piece of PyTorch code asks of a machine. launches: operations started (views move nothing and do not count).
    bytes: what these read and write if each goes to memory. flops: a multiply and an add each, of matrix products alone."""

    launches: int
    bytes: int
    flops: int


def count_work(run: Callable[[], object]) -> Work:
    """Run it once, and count."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    class Counter(TorchDispatchMode):
        launches = bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if not func.is_view:
                self.launches += 1
                self.bytes += _traffic(func.overloadpacket.__name__, args, out)
            return out

    flops = FlopCounterMode(display=False)
    with flops, Counter() as counter:
        run()
    return Work(counter.launches, counter.bytes, flops.get_total_flops())


def _traffic(name: str, args: object, out: object) -> int:
    """Bytes one operation moves: all that it is given and all that it makes; of a table, only the rows it picks."""
    import torch
    from torch.utils._pytree import tree_leaves

    def size(tree: object) -> int:
        return sum(t.numel() * t.element_size() for t in tree_leaves(tree) if isinstance(t, torch.Tensor))

    if name.startswith("empty"):
        return 0
    return 2 * size(out) if name in ("embedding", "index", "index_select", "gather") else size(args) + size(out)


def measure_device(device: str = "cpu", dtype: str = "float32", seconds: float = 1.0) -> Device:
    """Measure the ceilings of "cpu" or "cuda" in about `seconds`: a large copy and a large sum (the faster one counts), a large
    matrix product, and tiny additions one after another. Takes 512 MB for the time being, on a GPU up to 4 GB: 256 MB would be
    read there in about the time that starting and waiting takes."""
    import torch

    kind = getattr(torch, dtype)
    size = 256 << 20 if device == "cpu" else min(2 << 30, torch.cuda.mem_get_info()[0] // 8)
    source = torch.ones(size // kind.itemsize, dtype=kind, device=device)
    target = torch.empty_like(source)
    n = 8192 if device == "cuda" else 1024
    a, b = torch.randn(2, n, n, device=device).to(kind)
    one = torch.ones(1, device=device)
    with torch.inference_mode():
        copy = best_time(lambda: target.copy_(source), seconds / 4)
        total = best_time(lambda: source.sum(), seconds / 4)
        matmul = best_time(lambda: torch.mm(a, b), seconds / 4)
        launch = best_time(lambda: [one.add(1) for _ in range(100)], seconds / 4) / 100
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    size = source.numel() * kind.itemsize
    bandwidth = max(2 * size / copy, size / total)  # a copy reads and writes
    return Device(name, flops=2 * n**3 / matmul, bandwidth=bandwidth, launch_overhead=launch)
