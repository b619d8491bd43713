"""A CUDA device that is not there: tensors that say "cuda:0", hold real numbers, and are refused what CUDA refuses.

Much of what breaks an engine on a GPU is not about kernels. A tensor was left on the CPU; the host asks for a number and waits;
a copy is read before it has arrived; a recording is given new tensors where it reads the old ones. All of that shows here.

    with SimulatedCuda() as cuda:
        x = torch.ones(3, device="cuda")     # x.device is cuda:0, x.is_cuda is True
        x + torch.ones(3)                    # RuntimeError: Expected all tensors to be on the same device
        x.sum().item()                       # 3.0, and cuda.waits is ["item in example.py"]

How. All memory is the CPU's. Which device a tensor is on is a mark on its memory, so views have it, too. torch offers two hooks
that see everything that happens in a `with` block:

    TorchFunctionMode    shows each call as Python makes it: x.device, x.to("cuda"), torch.ones(3, device="cuda"). `_Calls`
                         takes the device out of the call, lets it run, and marks the result.
    TorchDispatchMode    shows each operator that calls become: aten.add, aten._local_scalar_dense (what .item() is).
                         `_Operators` compares the marks of its arguments, lets it run, and marks its results.

A third part replaces what torch.cuda says (`is_available`, `synchronize`, `graph`, ...).

What is simulated
    devices      an operator that is given tensors of both is refused; numpy() of a CUDA tensor, too
    waiting      everything that makes the host wait is in `waits`, and is refused under set_sync_debug_mode("error")
    copies       one to the host that nobody waits for (non_blocking) holds rubbish until somebody waits; one from page-locked
                 memory must find that memory unchanged when somebody waits
    graphs       a recording runs as `worker.operator_graph` repeats it; waits and copies are refused while it records; what it
                 made holds rubbish until it is replayed, and again when a graph of the same pool is replayed

What is not
    speed, and memory's size: nothing here says what a GPU would take or hold
    time: operators run at once and in order, so a race between streams, or threads, does not show
    Triton: the reference backend's functions stand in for the kernels, which tests/attention interprets and compiles
    the GPU's arithmetic: order of sums, TensorFloat-32, the last bit of exp()
    torch.compile; generators (a seed draws the CPU's numbers); a tensor of no dimension, which is a number wherever it is
    what a recording loses: CUDA's does not keep the tensors it reads alive. `worker.graph_safety` is there to find those, and
    its check of tensors on a real GPU (in tests/gpu) opens Triton's launchers, which this cannot follow
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minivllm.attention import reference
from minivllm.worker import operator_graph

CUDA = torch.device("cuda:0")
GIB = 1 << 30
_DECIDED_BY_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # a number, or the result's shape
_FROM_NUMBERS = {"tensor", "as_tensor", "asarray", "new_tensor"}  # made on the host, then copied
_NO_TENSOR = {"_parse_to"}  # reads arguments for nn.Module.to
_FACTS: dict[Any, Any] = {
    getter.__get__: answer  # type: ignore[union-attr]
    for getter, answer in ((torch.Tensor.device, CUDA), (torch.Tensor.is_cuda, True), (torch.Tensor.is_cpu, False))
}
_CpuGenerator = torch.Generator
_OUTSIDE = (__file__, str(Path(torch.__file__).parent), contextlib.__file__, operator_graph.__file__, "<")

# In place of the Triton kernels: the operators of `attention.gpu`, whose arguments are positional.
KERNELS: dict[str, Callable[..., Any]] = {
    "minivllm::triton_write_kv": reference.write_kv,
    "minivllm::triton_paged_decode": lambda q, cache, tables, lens, scale, window: reference.paged_decode(
        # of a recording's tables only the columns that are in use: the reference copies what it is given
        q,
        cache,
        tables[:, : -(-int(lens.max()) // cache.shape[2])],
        lens,
        scale=scale,
        sliding_window=window,
    ),
    "minivllm::triton_paged_prefill": lambda q, cache, starts, tables, lens, scale, window: reference.paged_prefill(
        q, cache, starts, tables, lens, scale=scale, sliding_window=window
    ),
}


def is_on_cuda(tensor: torch.Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "on_cuda", False)


def put_on_cuda(tensor: torch.Tensor, on_cuda: bool = True) -> torch.Tensor:
    """Mark its memory. Views share the mark, as they share the memory."""
    tensor.untyped_storage().on_cuda = on_cuda  # type: ignore[attr-defined]
    return tensor


def why_not() -> str | None:
    """None if this torch can be simulated, else what it lacks."""
    if torch.cuda.is_available():
        return "there is a real GPU: tests/gpu asks it"
    try:
        with SimulatedCuda() as cuda, torch.inference_mode():
            x = torch.nn.Parameter(torch.ones(2, device="cuda"), requires_grad=False)
            works = x.view(1, 2).is_cuda and (x + x).device == CUDA and x.sum().item() == 2.0 and len(cuda.waits) == 1
    except Exception as error:
        return f"torch {torch.__version__} lacks a hook of tests/worker/simulated_cuda.py ({type(error).__name__}: {error})"
    return None if works else f"torch {torch.__version__} keeps no marks on memory, or shows not every operator"


class SimulatedCuda:
    """A context manager. waits: what made the host wait, and in which file, in order."""

    def __init__(self, capability: tuple[int, int] = (9, 0), total_memory: int = 2 * GIB) -> None:
        self.capability, self.total_memory = capability, total_memory
        self.waits: list[str] = []
        self.is_recording = False
        self._sync_debug_mode = "default"
        self._under_way: list[Callable[[], None]] = []  # what becomes true, or must be, when somebody waits
        self._last_replayed: dict[Any, _Graph] = {}  # by pool
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> SimulatedCuda:
        self._stack.enter_context(mock.patch.multiple(torch.cuda, **self._torch_cuda()))
        self._stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        self._stack.enter_context(_Operators(self))
        self._stack.enter_context(_Calls(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _torch_cuda(self) -> dict[str, Any]:
        total, (major, minor) = self.total_memory, self.capability
        properties = SimpleNamespace(
            name="a simulated GPU", major=major, minor=minor, total_memory=total, multi_processor_count=132
        )
        return {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_name": lambda device=None: properties.name,
            "get_device_capability": lambda device=None: self.capability,
            "get_device_properties": lambda device=None: properties,
            "mem_get_info": lambda device=None: (total - total // 16, total),
            "memory_reserved": lambda device=None: 0,
            "max_memory_allocated": lambda device=None: 0,
            "reset_peak_memory_stats": lambda device=None: None,
            "empty_cache": lambda: None,
            "synchronize": self.synchronize,
            "current_stream": lambda device=None: SimpleNamespace(synchronize=self.synchronize),
            "set_sync_debug_mode": lambda mode: setattr(self, "_sync_debug_mode", mode),
            "graph_pool_handle": object,
            "CUDAGraph": lambda: _Graph(self),
            "graph": self._record,
        }

    # ---------------------------------------------------------------- waiting

    def wait(self, what: str) -> None:
        """The host waits because of `what`, which may not be what its author had in mind."""
        if self._sync_debug_mode == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {what} in {_where()}")
        self._wait(what)

    def synchronize(self, device: object = None) -> None:
        self._wait("synchronize")

    def _wait(self, what: str) -> None:
        self.refuse_while_recording(what)
        self.waits.append(f"{what} in {_where()}")
        arrived, self._under_way = self._under_way, []
        with torch.inference_mode():  # where the tensors may have been made
            for arrive in arrived:
                arrive()

    def refuse_while_recording(self, what: str) -> None:
        if self.is_recording:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what} in {_where()}")

    # ---------------------------------------------------------------- copies

    def to_device(self, source: torch.Tensor, non_blocking: bool, what: str) -> torch.Tensor:
        """A copy of a tensor on the host."""
        self.refuse_while_recording(what)
        if not non_blocking:
            self.wait(what)
        elif getattr(source.untyped_storage(), "is_page_locked", False):
            sent, place = source.clone(), _where()

            def check() -> None:
                if not torch.equal(source, sent):
                    raise RuntimeError(f"page-locked memory was overwritten while it was being copied: {what} in {place}")

            self._under_way.append(check)
        return put_on_cuda(source.clone())

    def to_host(self, source: torch.Tensor, non_blocking: bool, what: str, into: torch.Tensor | None = None) -> torch.Tensor:
        """A copy of a tensor on the device, in memory of its own or `into` this one."""
        self.refuse_while_recording(what)
        sent = put_on_cuda(source.clone(), False)
        if not non_blocking:
            self.wait(what)
            return sent if into is None else into.copy_(sent)
        copy = torch.empty_like(sent) if into is None else into
        _fill_with_rubbish(copy)

        def arrive() -> None:
            copy.copy_(sent)

        self._under_way.append(arrive)
        return copy

    # ---------------------------------------------------------------- graphs

    @contextlib.contextmanager
    def _record(self, graph: _Graph, pool: object = None, **_: object) -> Iterator[None]:
        """torch.cuda.graph. Operators run, for their results' shapes; then nothing has been computed."""
        self.synchronize()
        self.is_recording = True
        try:
            with graph.recording.capture():
                yield
        finally:
            self.is_recording = False
        graph.pool = pool
        graph.forget()

    def replaying(self, graph: _Graph) -> None:
        self.refuse_while_recording("replay")
        last = self._last_replayed.get(graph.pool)
        if last is not None and last is not graph:
            last.forget()  # its memory is this one's, too
        self._last_replayed[graph.pool] = graph


class _Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        self.recording = operator_graph.OperatorGraph()
        self.pool: object = None
        self._cuda = cuda

    def replay(self) -> None:
        self._cuda.replaying(self)
        self.recording.replay()

    @torch.inference_mode()
    def forget(self) -> None:
        for operation in self.recording.operations:
            for tensor in operation.made.values():
                _fill_with_rubbish(tensor)


class _Generator(torch.Generator):
    """torch.Generator, of any device."""

    def __new__(cls, device: object = "cpu") -> Any:
        return _CpuGenerator()


class _Calls(TorchFunctionMode):
    """Sees torch as Python calls it. What a call does inside is not shown here again, only its operators are."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        on_cuda = bool(args) and isinstance(args[0], torch.Tensor) and is_on_cuda(args[0])
        if on_cuda and func in _FACTS:
            return _FACTS[func]
        if on_cuda and name in ("numpy", "__array__"):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        if on_cuda and name == "tolist":  # of memory that is the CPU's after all, it becomes no operator
            self.cuda.wait(name)
        if name in ("to", "cpu", "cuda") and isinstance(args[0], torch.Tensor):
            return self._move(name, *args, **kwargs)
        if name not in _NO_TENSOR and (kwargs.get("pin_memory") or _is_cuda(kwargs.get("device"))):
            return self._make(func, name, args, **kwargs)
        return func(*args, **kwargs)

    def _move(self, name: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if name != "to":
            args = (CUDA if name == "cuda" else "cpu", *args)
        elif isinstance(args[0] if args else None, torch.Tensor):  # x.to(other)
            args = (CUDA if is_on_cuda(args[0]) else "cpu", args[0].dtype, *args[1:])
        device, dtype, non_blocking, *_ = torch._C._nn._parse_to(*args, **kwargs)
        kwargs.pop("device", None)
        if device is not None and _is_cuda(device) != is_on_cuda(tensor):
            move = self.cuda.to_device if _is_cuda(device) else self.cuda.to_host
            return move(tensor if dtype is None else tensor.to(dtype), non_blocking, name)
        return tensor.to(dtype or tensor.dtype, copy=bool(kwargs.get("copy")))

    def _make(self, func: Any, name: str, args: Any, *, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
        made: torch.Tensor = func(*args, **kwargs)
        if pin_memory:
            made.untyped_storage().is_page_locked = True  # type: ignore[attr-defined]
        if _is_cuda(device):
            if name in _FROM_NUMBERS:
                return self.cuda.to_device(made, False, name)
            put_on_cuda(made)
        return made


class _Operators(TorchDispatchMode):
    """Sees the operators that calls become."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        super().__init__()
        self.cuda = cuda

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, two seconds, to tell it that this is not to be compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(map(is_on_cuda, given)):
            return func(*args, **kwargs)
        with self:  # an operator made of others shows them
            results = func.decompose(*args, **kwargs)
        if results is not NotImplemented:
            return results
        name = func.overloadpacket.__name__
        on_host = [tensor for tensor in given if tensor.dim() and not is_on_cuda(tensor)]
        if name == "copy_" and on_host:
            return self._copy(*args, **kwargs)
        if "index" in name and isinstance(args[1], (list, tuple)):
            self._look_at_indices(func, name, args, on_host)
        else:
            self._refuse_two_devices(func, on_host)
            self._look_at_shape(func, name, kwargs)
        results = KERNELS.get(func.name(), func)(*args, **kwargs)
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.Tensor):
                put_on_cuda(leaf)
        return results

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """target.copy_(source), from one device to the other."""
        if is_on_cuda(source):
            return self.cuda.to_host(source, non_blocking, "copy_", target)
        return target.copy_(self.cuda.to_device(source, non_blocking, "copy_"))

    def _look_at_indices(self, func: Any, name: str, args: Any, on_host: list[torch.Tensor]) -> None:
        """x[i, j], or x[i, j] = value: CUDA fetches indices from the host, and must count what a mask keeps."""
        indices = [index for index in args[1] if isinstance(index, torch.Tensor)]
        self._refuse_two_devices(func, [t for t in on_host if not any(t is index for index in indices)])
        if not all(map(is_on_cuda, indices)):
            self.cuda.wait("index on the host")
        is_fill = name != "index" and args[2].numel() == 1
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices) and not is_fill:
            self.cuda.wait("mask as an index")

    def _look_at_shape(self, func: Any, name: str, kwargs: Any) -> None:
        """The host must know a number, or how large a result is, before it can go on."""
        if name == "repeat_interleave":
            is_known = kwargs.get("output_size") is not None or func._overloadname == "self_int"
        else:
            is_known = not _DECIDED_BY_DATA & set(func.tags)
        if not is_known:
            self.cuda.wait("item" if name == "_local_scalar_dense" else name)

    def _refuse_two_devices(self, func: Any, on_host: list[torch.Tensor]) -> None:
        if on_host:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in on_host)
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
                f" {func} in {_where()} is given {shapes} on the CPU."
            )


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _fill_with_rubbish(tensor: torch.Tensor) -> None:
    """What a value that has not come yet may be."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else True if tensor.dtype == torch.bool else -99)


def _where() -> str:
    """The file that called torch."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OUTSIDE):
        frame = frame.f_back
    return Path(frame.f_code.co_filename).name
