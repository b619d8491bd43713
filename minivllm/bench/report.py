"""What a result file says beside its figures: the device, the versions, and the summary of repeated runs."""

from __future__ import annotations

import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any


def device_info() -> dict[str, Any]:
    """The machine the figures belong to. Never a user or host name."""
    import torch

    info: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        info["gpu"] = torch.cuda.get_device_name()
        info["cuda"] = torch.version.cuda
    return info


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def device_line(info: dict[str, Any]) -> str:
    gpu = f", {info['gpu']}" if "gpu" in info else ", no GPU"
    return f"{info['cpu']}, {info['cores']} cores{gpu}, torch {info['torch']}"


def summary(values: list[float]) -> dict[str, float]:
    """Median and spread of repeated runs. `spread` is (max - min) / median."""
    middle = statistics.median(values)
    return {"median": middle, "min": min(values), "max": max(values), "spread": (max(values) - min(values)) / middle}


def write_json(path: str | Path, data: dict[str, Any]) -> None:
    """Write a result file whole or not at all."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".tmp")
    temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, target)
