"""Arrays to the device: on a CPU without a copy, to a GPU in one buffer (whose packing needs no GPU to be tested)."""

from __future__ import annotations

import numpy as np
import torch

from minivllm.worker.transfer import pack, to_device, unpack

ARRAYS = [
    np.arange(5),
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.zeros(0, dtype=np.int64),
    np.array([0.5, -1.5, 2.0], dtype=np.float32),
    np.array([True, False, True]),
    np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2],  # not contiguous
]


def test_on_a_cpu_memory_is_shared() -> None:
    tensors = to_device(ARRAYS, torch.device("cpu"))
    for array, tensor in zip(ARRAYS, tensors, strict=True):
        assert np.array_equal(tensor.numpy(), array) and tensor.numpy().dtype == array.dtype
    assert tensors[0].data_ptr() == ARRAYS[0].ctypes.data


def test_what_is_packed_is_unpacked() -> None:
    starts = [0, 48, 80, 80, 96, 112, 144]
    buffer = np.full(144, 0xAA, dtype=np.uint8)
    pack(ARRAYS, starts, buffer)
    for array, tensor in zip(ARRAYS, unpack(torch.from_numpy(buffer), ARRAYS, starts), strict=True):
        assert tensor.shape == array.shape
        assert np.array_equal(tensor.numpy(), array) and tensor.numpy().dtype == array.dtype
