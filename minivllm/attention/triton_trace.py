"""Which memory each program of an interpreted kernel touches. Lab 08 draws its map from it, and its checks find stray reads
with it. Works in Triton's interpreter alone (TRITON_INTERPRET=1), where a load is NumPy's, and addresses are numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Access:
    """One load or store of a program. addresses [n]: of those numbers that the mask let through; itemsize: bytes of each."""

    program: tuple[int, int, int]
    is_store: bool
    addresses: np.ndarray
    itemsize: int

    def offsets_in(self, tensor: torch.Tensor) -> np.ndarray:
        """The accesses that hit a contiguous tensor, as offsets in its numbers, in order."""
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
        inside = (self.addresses >= start) & (self.addresses < stop)
        return (self.addresses[inside] - start) // tensor.element_size()


@contextmanager
def recording() -> Iterator[list[Access]]:
    """While it is open, every load and store of every interpreted kernel is written down, in order."""
    from triton.runtime.interpreter import interpreter_builder as builder

    found: list[Access] = []
    load, store = builder.create_masked_load, builder.create_masked_store

    def note(pointers: Any, mask: Any, is_store: bool) -> None:
        addresses, allowed = np.broadcast_arrays(np.asarray(pointers.data), np.asarray(mask.data, dtype=bool))
        itemsize = pointers.get_element_ty().primitive_bitwidth // 8
        found.append(Access(builder.grid_idx, is_store, addresses[allowed].astype(np.int64), itemsize))

    def noted_load(ptrs: Any, mask: Any, *rest: Any) -> Any:
        note(ptrs, mask, is_store=False)
        return load(ptrs, mask, *rest)

    def noted_store(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        note(ptrs, mask, is_store=True)
        return store(ptrs, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = noted_load, noted_store
    try:
        yield found
    finally:
        del builder.create_masked_load, builder.create_masked_store  # the class's own again
