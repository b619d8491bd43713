"""Compile Triton kernels for a GPU that is not here, and read what the compiler says of them. Lab 08 uses it where there is no
GPU; so do the tests, for sm_80 and sm_90. Needs Triton, and a process that does not interpret (TRITON_INTERPRET unset).

Nothing is launched: a call is watched for the kernels it *would* launch, with which arguments, and these are compiled as they
would be there, down to machine code.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "i1",
}
_OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Launch:
    """One launch that was held back: the kernel (a triton.JITFunction), its grid, its arguments by name, and options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]


@dataclass(frozen=True)
class CompiledKernel:
    """What ptxas reports of a kernel. registers: of a thread, 255 at most.   spilled_bytes: what a thread puts into memory for
    want of registers.   shared_memory: bytes of a program.   ptx: its assembly."""

    name: str
    registers: int
    spilled_bytes: int
    shared_memory: int
    ptx: str


@contextmanager
def launches_held_back() -> Iterator[list[Launch]]:
    """While it is open no kernel is launched; what would have been is in the list. Outputs keep whatever memory held."""
    from triton.runtime.jit import JITFunction

    held: list[Launch] = []

    def hold(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        arguments = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        held.append(Launch(kernel, tuple(grid), arguments, options))

    original = JITFunction.run
    JITFunction.run = hold
    try:
        yield held
    finally:
        JITFunction.run = original


def compile_kernels(call: Callable[[], object], capability: int) -> list[CompiledKernel]:
    """Every kernel that `call()` launches, compiled for compute capability 80, 90, ... Tensors it is given may be on the CPU.

    Raises RuntimeError with the compiler's words if one does not compile.
    """
    with launches_held_back() as launches:
        call()
    return [compile_launch(launch, capability) for launch in launches]


def compile_launch(launch: Launch, capability: int) -> CompiledKernel:
    import triton
    from triton.backends.compiler import GPUTarget

    with _compilers_remarks_kept():
        compiled = triton.compile(_source_of(launch), target=GPUTarget("cuda", capability, 32), options=launch.options)
    registers, spilled = _assembler_report(compiled.asm["ptx"])
    return CompiledKernel(launch.kernel.fn.__name__, registers, spilled, compiled.metadata.shared, compiled.asm["ptx"])


def read_launch(launch: Launch, capability: int) -> str:
    """The compiler's first stage alone, which reads Python and settles every type: nearly all that it refuses it refuses here,
    within 0.1 s, and without a program or a file of its own (so also in a jail). Returns the kernel in Triton's own
    intermediate language, where every value has a type; what it calls stands in it.

    Raises triton.compiler.errors.CompilationError as it comes: `src`, `node` and `__cause__` say where.
    """
    from triton._C.libtriton import ir, passes
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    source, target = _source_of(launch), GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = backend.parse_options({**launch.options, **source.parse_options()})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    given = {
        "target": target,
        "options": options,
        "codegen_fns": backend.get_codegen_implementation(options),
        "module_map": backend.get_module_map(),
        "context": context,
    }
    wanted = inspect.signature(source.make_ir).parameters  # Triton 3.4's has no target
    module = source.make_ir(**{name: value for name, value in given.items() if name in wanted})
    inliner = ir.pass_manager(context)
    passes.common.add_inliner(inliner)
    try:
        inliner.run(module, "inline")
    except TypeError:  # Triton 3.4's takes no name
        inliner.run(module)
    return str(module)


def _source_of(launch: Launch) -> Any:
    """The kernel with its arguments' types, as Triton compiles it."""
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        specialize = not parameter.do_not_specialize
        if parameter.is_constexpr or (specialize and type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        signature[parameter.name] = _type_of(value)
        # as at a real launch: addresses and numbers that are multiples of 16 allow wide loads (torch aligns what it allocates)
        if specialize and (isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)


@contextmanager
def _compilers_remarks_kept() -> Iterator[None]:
    """The compiler, which is C++, writes remarks to the process's outputs; they are shown only if it fails."""
    with tempfile.TemporaryFile() as remarks:
        outputs = [(number, os.dup(number)) for number in (1, 2)]
        try:
            for number, _ in outputs:
                os.dup2(remarks.fileno(), number)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except Exception as error:
            remarks.seek(0)
            raise RuntimeError(f"{error}\n{remarks.read().decode(errors='replace')[-4000:]}") from error
        finally:
            for number, kept in outputs:
                os.dup2(kept, number)
                os.close(kept)


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _assembler_report(ptx: str) -> tuple[int, int]:
    """Registers and spilled bytes of a thread, from ptxas, which Triton brings."""
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target, "PTX always names its target"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        command = [_ptxas(target[1]), "-v", f"--gpu-name={target[1]}", str(source), "-o", str(source.with_suffix(".cubin"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ptxas failed: {done.stderr.strip()}")
    registers = re.search(r"Used (\d+) registers", done.stderr)
    spilled = re.search(r"(\d+) bytes spill stores", done.stderr)
    if not registers:
        raise RuntimeError(f"ptxas did not say how many registers it used: {done.stderr.strip()}")
    return int(registers[1]), int(spilled[1]) if spilled else 0


def _ptxas(architecture: str) -> str:
    from triton import knobs

    tool = knobs.nvidia.ptxas_blackwell if architecture >= "sm_100" and hasattr(knobs.nvidia, "ptxas_blackwell") else None
    return str((tool or knobs.nvidia.ptxas).path)
