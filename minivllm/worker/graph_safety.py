"""Whether a piece of code can be captured into a CUDA graph, asked without a GPU. Lab 09 shows its faults; CI runs it over the
real decode step.

A capture records what the GPU is asked to do, and a replay repeats it, so the captured code must be the same every time and
must never wait for the GPU. What breaks that has five kinds:

    host read       the host asks for a number the GPU has to compute first: .item(), .tolist(), `if tensor:`, print(tensor)
    host copy       a copy from or to the host, or a tensor made of the host's numbers: a replay would repeat the old ones
    data-dependent shape        nonzero(), x[mask]: how much memory and how many programs? Only the data knows
    fresh input     it reads a tensor that is neither a static buffer nor a weight nor made here: gone when the replay comes
    wait            torch.cuda.synchronize()

The code is run once under two watchers: one sees Python's calls of torch, the other the operators these become. It can be run
on ordinary tensors, where faults are listed and the run goes on, or on tensors of torch's "meta" device, which have shapes but
no numbers to read, and to which a CPU tensor is on another device: that is the stricter way. Our own operators are opened:
their Python runs under the watchers too, with the kernels held back where there is no GPU to run them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from minivllm.attention.gpu import OPERATOR_BODIES
from minivllm.worker.operator_graph import tensors_in

# Python's calls, by name; where the operator beneath says the same, the call says it better
_HOST_READS = {
    "item",
    "tolist",
    "numpy",
    "__array__",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__format__",
    "__repr__",
}
_HOST_COPIES = {"tensor", "as_tensor", "from_numpy", "new_tensor", "cpu", "cuda", "pin_memory"}
_SHAPES = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"}
_MAKE_IT_ONCE = "Make it once, before the capture, and copy new numbers into it from outside."
_TORCH_FOLDER = str(Path(torch.__file__).parent)
_THIS_FILE = __file__


@dataclass(frozen=True)
class Fault:
    """kind: see above.   call: the torch call or operator.   where: file and line.   code: that line."""

    kind: str
    call: str
    where: str
    code: str
    why: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.call} at {self.where}: `{self.code}`. {self.why}"


class GraphSafetyError(RuntimeError):
    """The code cannot be captured. `faults` says where and why."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("This cannot be captured into a CUDA graph:\n" + "\n".join(f"  {fault}" for fault in faults))
        self.faults = faults


def check_graph_safe(run: Callable[[], object], static: Iterable[torch.Tensor]) -> None:
    """Raises GraphSafetyError if `find_faults` finds any."""
    if faults := find_faults(run, static):
        raise GraphSafetyError(faults)


def find_faults(
    run: Callable[[], object],
    static: Iterable[torch.Tensor],
    bodies: Mapping[str, Callable[..., Any]] = OPERATOR_BODIES,
) -> list[Fault]:
    """Run it once and list what capture would reject, one fault a line of code and kind. `static`: the tensors that stay where
    they are between replays: input buffers, weights, KV caches. `bodies`: operators whose Python is to be watched too; if there
    are none, no Triton kernel is expected either.

    If the run cannot go on after a fault (meta tensors have no number to give), the faults up to there are listed; an error
    that no fault explains is raised.
    """
    faults = _Faults()
    static = list(static)
    try:
        held_back = _kernels_held_back(static) if bodies else contextlib.nullcontext()
        with _waits_watched(faults), held_back, _CallWatcher(faults), _OperatorWatcher(faults, static, bodies):
            run()
    except _CannotGoOn:
        pass
    except Exception:
        if not faults.found:
            raise
    return list(faults.found.values())


class _CannotGoOn(Exception):
    """A fault on meta tensors: there is no number to go on with."""


class _Faults:
    def __init__(self) -> None:
        self.found: dict[tuple[str, str], Fault] = {}
        self._is_muted = False

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        before, self._is_muted = self._is_muted, True
        try:
            yield
        finally:
            self._is_muted = before

    def add(self, kind: str, call: str, why: str) -> None:
        if self._is_muted:
            return
        frame = sys._getframe()
        while frame.f_back is not None and _is_machinery(frame.f_code.co_filename):
            frame = frame.f_back
        code = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        self.found.setdefault((where, kind), Fault(kind, call, where, code, why))


def _is_machinery(filename: str) -> bool:
    return filename == _THIS_FILE or filename.startswith((_TORCH_FOLDER, "<frozen", "<string", "<eval_with"))


class _CallWatcher(TorchFunctionMode):
    """Sees torch as Python calls it. On a CPU this is the only way to see `tolist` or `numpy`, which call no operator."""

    def __init__(self, faults: _Faults) -> None:
        super().__init__()
        self.faults = faults

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in _HOST_READS:
            self.faults.add("host read", name, "The host would wait for a number, and a replay would go by the old one.")
        elif name in _HOST_COPIES or (name == "to" and "cpu" in (*args[1:], kwargs.get("device"))):
            self.faults.add("host copy", name, _MAKE_IT_ONCE)
        else:
            return func(*args, **kwargs)
        with self.faults.muted():  # said once is enough
            return func(*args, **kwargs)


class _OperatorWatcher(TorchDispatchMode):
    """Sees the operators that calls become, and the memory they use."""

    def __init__(self, faults: _Faults, static: Iterable[torch.Tensor], bodies: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()
        self.faults = faults
        self.bodies = bodies
        self.known = {_storage_of(tensor): tensor for tensor in static}  # tensors are kept: their memory must not be given anew

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, two seconds, to tell it that this is not to be compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = tensors_in((args, kwargs))
        self._look_at(func, name, args, kwargs, given)
        if (body := self.bodies.get(func.name().split(".")[0])) is not None:
            with self:
                return body(*args, **kwargs)
        with self:  # an operator made of others shows them
            results = func.decompose(*args, **kwargs)
        if results is NotImplemented:
            results = func(*args, **kwargs)
        for tensor in tensors_in(results):
            self.known.setdefault(_storage_of(tensor), tensor)
        return results

    def _look_at(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]) -> None:
        for tensor in given:
            if _storage_of(tensor) in self.known:
                continue
            self.known[_storage_of(tensor)] = tensor
            if name != "lift_fresh":
                self.faults.add("fresh input", name, "A replay will not find this tensor: copy it into a static buffer.")
            elif tensor.dim():  # made of the host's numbers; a single one becomes part of a kernel's call
                self.faults.add("host copy", name, _MAKE_IT_ONCE)
        if torch.Tag.data_dependent_output in func.tags:
            self.faults.add("host read", name, "The host would wait for a number, and a replay would go by the old one.")
            self._stop_without_numbers(given)
        elif _has_data_dependent_shape(func, name, args, kwargs):
            self.faults.add("data-dependent shape", name, "Compute all of it, and mask what does not count.")
            self._stop_without_numbers(given)
        devices = {tensor.device.type for tensor in given if tensor.dim() or tensor.device.type != "cpu"}
        target = kwargs.get("device")
        if target is not None and given:
            devices.add(torch.device(target).type)
        if len(devices) > 1:
            self.faults.add("host copy", name, _MAKE_IT_ONCE)
            self._stop_without_numbers(given)

    @staticmethod
    def _stop_without_numbers(given: list[torch.Tensor]) -> None:
        if any(tensor.is_meta for tensor in given):
            raise _CannotGoOn


def _has_data_dependent_shape(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None and func._overloadname != "self_int"
    if name.startswith(("index", "_index_put")) and len(args) > 1 and isinstance(args[1], (list, tuple)):
        masks = [index for index in args[1] if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)]
        fills = "index_put" in name and args[2].numel() == 1  # x[mask] = 0 is a masked fill
        return bool(masks) and not fills
    return name in _SHAPES or torch.Tag.dynamic_output_shape in func.tags


@contextlib.contextmanager
def _waits_watched(faults: _Faults) -> Iterator[None]:
    def synchronize(*_: Any) -> None:
        faults.add("wait", "torch.cuda.synchronize", "The host may not wait for the GPU while it records.")

    with mock.patch("torch.cuda.synchronize", synchronize):
        yield


def _kernels_held_back(static: list[torch.Tensor]) -> contextlib.AbstractContextManager[object]:
    """Triton kernels run on a GPU's tensors alone, unless they are interpreted."""
    if all(tensor.is_cuda for tensor in static) or importlib.util.find_spec("triton") is None:
        return contextlib.nullcontext()
    from minivllm.attention.triton_compile import launches_held_back

    return launches_held_back()


def _storage_of(tensor: torch.Tensor) -> int:
    """Which storage it is a view of. Not its address: a "meta" tensor has none."""
    return tensor.untyped_storage()._cdata
