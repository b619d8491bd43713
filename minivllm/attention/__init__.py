"""Attention backends: `interface.py` says what one is, `get_backend` finds it by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from minivllm.attention.interface import AttentionBackend


def get_backend(name: str, device_type: str, dtype: torch.dtype) -> AttentionBackend:
    """The backend `name` ("auto", "naive", "reference", "cpu") for a model of `dtype` on `device_type`.

    "auto" is the fastest there is for the device. Raises ValueError for a name that does not exist or does not run there.
    """
    if name == "auto":
        name = "cpu" if device_type == "cpu" else "reference"
    if name == "naive":
        from minivllm.attention.naive import NAIVE

        return NAIVE
    if name == "reference":
        from minivllm.attention.reference import REFERENCE

        return REFERENCE
    if name == "cpu":
        if device_type != "cpu":
            raise ValueError(f"attention_backend='cpu' does not run on device {device_type!r}. Use 'auto'.")
        from minivllm.attention.cpu import cpu_backend

        return cpu_backend(dtype)
    raise ValueError(f"attention_backend={name!r} is not one of 'auto', 'naive', 'reference', 'cpu'.")
