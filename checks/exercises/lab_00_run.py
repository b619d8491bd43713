"""Lab 00, beside the student's code: runs in the child, and knows no answer. lab_00.py judges what comes back."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from checks.exercises import Case
from minivllm.models.registry import ModelConfig
from minivllm.sim.hardware import Device


def run_double(module: ModuleType, case: Case) -> Any:
    return module.double(case["x"])


def run_bytes(module: ModuleType, case: Case) -> Any:
    """Exercise 0.1: one of the two functions, on a small model's config."""
    config = ModelConfig(architecture="LlamaForCausalLM", max_position_embeddings=128, **case["sizes"])
    return _plain(getattr(module, case["function"])(config, *case["rest"]))


def run_step_time(module: ModuleType, case: Case) -> Any:
    return _plain(module.step_time(*case["counts"], Device("toy", *case["device"])))


def _plain(value: Any) -> Any:
    """A tensor of one number is as good as the number."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


RUN = {"0.0": run_double, "0.1": run_bytes, "0.2": run_step_time}
