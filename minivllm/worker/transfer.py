"""From the host to the device: the arrays of a step, in one copy that nobody waits for. May not know what they mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGNMENT = 16  # bytes: of any dtype's views, and of the widest loads


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays, [...] of any shapes and types, as tensors on `device`. On a CPU they share the arrays' memory where that is
    contiguous.

    On a GPU they are packed into one page-locked buffer (only from such memory can the GPU copy while the host goes on) and
    sent with one copy: a small copy costs its launch, not its bytes. The buffer may be dropped at once: torch's allocator
    for page-locked memory gives it to nobody before the copy is done.
    """
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    starts = np.cumsum([0, *(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)]).tolist()
    staging = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    pack(arrays, starts, staging.numpy())
    return unpack(staging.to(device, non_blocking=True), arrays, starts)


def pack(arrays: Sequence[np.ndarray], starts: Sequence[int], buffer: np.ndarray) -> None:
    """Write each array's bytes into buffer [uint8], from its start on."""
    for array, start in zip(arrays, starts, strict=False):
        buffer[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def unpack(buffer: torch.Tensor, arrays: Sequence[np.ndarray], starts: Sequence[int]) -> list[torch.Tensor]:
    """Views into buffer [uint8], with the arrays' dtypes and shapes."""
    views = []
    for array, start in zip(arrays, starts, strict=False):
        dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        views.append(buffer[start : start + array.nbytes].view(dtype).view(array.shape))
    return views
