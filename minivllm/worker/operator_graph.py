"""OperatorGraph: a CUDA graph's behaviour on any device. Lab 09 uses it where there is no GPU. May not know what it records.

Inside `capture()` every torch operator runs and is written down with the tensors it was given and the tensors it made.
`replay()` runs the list again and puts each result into the memory of the first one: so it has a graph's three properties.

    * What is read is memory, not names: to give a replay other inputs, write them into the tensors that were recorded.
    * Python is not replayed. A number the host read, or an `if` it took, is as it was.
    * The result appears where it appeared the first time.

It saves the Python between operators, not the operators' own launches, and pays with a copy for each result: it is there to be
understood and tested with, not to be fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Operation:
    """One operator's call. made: the tensors it put into memory of their own, to be written again; others it returned are views
    of its arguments."""

    operator: Any  # torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: dict[int, torch.Tensor]  # by position among the tensors it returns

    @property
    def name(self) -> str:
        return str(self.operator)


class OperatorGraph:
    """operations: what was recorded, in order."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Record what runs inside. Raises RuntimeError if something is recorded already."""
        if self.operations:
            raise RuntimeError("This graph is recorded already: make a new one.")
        with _Recorder(self.operations):
            yield

    @torch.inference_mode()
    def replay(self) -> None:
        """Run the operators again, on the memory they had."""
        for operation in self.operations:
            results = tensors_in(operation.operator(*operation.args, **operation.kwargs))
            for position, target in operation.made.items():
                target.copy_(results[position])


class _Recorder(TorchDispatchMode):
    def __init__(self, operations: list[Operation]) -> None:
        super().__init__()
        self.operations = operations

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, two seconds, to tell it that this is not to be compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {_address_of(tensor) for tensor in tensors_in((args, kwargs))}
        results = func(*args, **kwargs)
        # by their memory, not by what the operator's schema says: `reshape` is a view or a copy, as it comes
        made = {i: tensor for i, tensor in enumerate(tensors_in(results)) if _address_of(tensor) not in given}
        is_allocation = func.overloadpacket.__name__.startswith("empty")  # nothing to write again
        if not is_allocation and (made or func._schema.is_mutable):
            self.operations.append(Operation(func, args, kwargs, made))
        return results


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _address_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
