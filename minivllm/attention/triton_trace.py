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
    """One load or store of a program. addresses [n]: of those numbers that the mask let through; itemsize: bytes of each;
    undefined: a load of floating-point numbers that masks some of them and says no `other`."""

    program: tuple[int, int, int]
    is_store: bool
    addresses: np.ndarray
    itemsize: int
    undefined: bool = False

    def offsets_in(self, tensor: torch.Tensor) -> np.ndarray:
        """The accesses that hit a contiguous tensor, as offsets in its numbers, in order."""
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
        inside = (self.addresses >= start) & (self.addresses < stop)
        return (self.addresses[inside] - start) // tensor.element_size()


@contextmanager
def recording(*, garbage: bool = False) -> Iterator[list[Access]]:
    """While it is open, every load and store of every interpreted kernel is written down, in order.

    With `garbage`, numbers that a load masks without an `other` are NaN, and integers the largest there is: on a GPU they are
    whatever a register held. The interpreter's own are 0, which hides the mistake.
    """
    from triton.runtime.interpreter import TensorHandle
    from triton.runtime.interpreter import interpreter_builder as builder

    found: list[Access] = []
    load, store, splat = builder.create_masked_load, builder.create_masked_store, builder.create_splat

    def note(pointers: Any, mask: Any, is_store: bool, undefined: bool = False) -> None:
        addresses, allowed = np.broadcast_arrays(np.asarray(pointers.data), np.asarray(mask.data, dtype=bool))
        itemsize = pointers.get_element_ty().primitive_bitwidth // 8
        undefined = undefined and pointers.get_element_ty().is_floating() and not bool(allowed.all())
        found.append(Access(builder.grid_idx, is_store, addresses[allowed].astype(np.int64), itemsize, undefined))

    def noted_load(ptrs: Any, mask: Any, other: Any, *rest: Any) -> Any:
        note(ptrs, mask, is_store=False, undefined=other is None)
        if other is None and garbage:
            zeros = load(ptrs, TensorHandle(np.zeros_like(ptrs.data, dtype=bool), mask.dtype), None, *rest)
            other = TensorHandle(np.full_like(zeros.data, _garbage(zeros.data.dtype)), zeros.dtype)
        return load(ptrs, mask, other, *rest)

    def noted_store(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        note(ptrs, mask, is_store=True)
        return store(ptrs, value, mask, *rest)

    def kept_splat(*given: Any) -> Any:
        """A condition made as wide as another: the interpreter of Triton 3.9 makes it integers, and refuses them as a mask."""
        made = splat(*given)
        if any(isinstance(one, TensorHandle) and one.data.dtype == np.bool_ for one in given):
            made.data = made.data.astype(np.bool_)
        return made

    builder.create_masked_load, builder.create_masked_store, builder.create_splat = noted_load, noted_store, kept_splat
    try:
        yield found
    finally:
        del builder.create_masked_load, builder.create_masked_store, builder.create_splat  # the class's own again


def _garbage(dtype: np.dtype) -> Any:
    """bfloat16 is an unsigned integer in the interpreter, whose largest is NaN too."""
    return np.nan if dtype.kind == "f" else True if dtype.kind == "b" else np.iinfo(dtype).max
