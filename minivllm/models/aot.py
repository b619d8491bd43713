"""Modules of layers as shared libraries for CPUs: what the compiled decoder and the compiled EAGLE head have in common.

    torch.export      a module -> a graph, the number of tokens left open, attention as one operator of ours
    freezing          weights become constants of the graph, and are packed
    aot_compile       the graph -> C++ -> NAME.so; the packed weights of all parts -> weights.bin

A library calls `minivllm::cpu_attention` (`attention/cpu.py`) once a layer: prefill and decode rows in one call, keys and
values written in place. May not know the engine, or which models there are.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from minivllm.attention.interface import AttentionMetadata
from minivllm.models.decoder import Attend
from minivllm.models.registry import ModelConfig

DTYPES = (torch.float32, torch.bfloat16)  # those the attention operator has kernels for
EXAMPLE_TOKENS = 32  # kernels fit any number; block sizes are chosen with this one in mind
INDUCTOR: dict[str, Any] = {
    "freezing": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP",  # one choice: nothing is timed, so a busy machine compiles the same kernels
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.package_constants_on_disk_format": "pickle_weights",
}
# Inductor's own int4 kernel unpacks a whole panel of weights before it multiplies; torch's does it on the way.
INT4: dict[str, Any] = {"max_autotune_gemm_backends": "ATEN"}
_WEIGHTS, _INDEX = "weights.bin", "weights.json"
_ALIGNMENT = 64  # a cache line; what the kernels load is then never split


@dataclass(frozen=True, slots=True)
class Part:
    """One library to be: a module, example arguments, their open dimensions, and what differs of inductor's options."""

    name: str
    module: nn.Module
    arguments: tuple[Any, ...]
    open_dimensions: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)


def compile_parts(
    parts: Iterable[Part], folder: Path, say: Callable[[str], None], mapped: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Compile each part into an existing folder, and save the weights of all. Each is traced before the next is asked for.

    `mapped`: further tensors (an embedding [vocab, hidden]), saved first; whoever loads them maps them. Raises ValueError where
    there is no compiler, or no saving of what the processor packs."""
    from torch._inductor.utils import fresh_cache

    weights = {name: tensor.detach() for name, tensor in (mapped or {}).items()}
    num_mapped = len(weights)
    scratch = folder / "inductor"
    scratch.mkdir()
    with torch.no_grad(), fresh_cache(dir=str(scratch)):
        for part in parts:
            say(f"tracing {part.name}")
            program = torch.export.export(part.module, part.arguments, dynamic_shapes=part.open_dimensions, strict=False)
            say(f"compiling {part.name}")
            for name, tensor in _collect(_aot_compile(program, INDUCTOR | part.options), folder / part.name):
                weights[f"{part.name}.{name}"] = tensor
    scratch.rmdir()
    say("saving the packed weights")
    _save_weights(weights, num_mapped, folder)


def load_parts(folder: Path, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The libraries by name, and all tensors, which must live as long as the libraries: they read them in place. OSError,
    ValueError or RuntimeError for a folder that is broken."""
    torch.cpu._init_amx()  # the system grants a process its tile registers on demand, and kills one that did not ask
    weights, libraries = _load_weights(folder), {}
    for part in names:
        library = torch._C._aoti.AOTIModelContainerRunnerCpu(str(folder / f"{part}.so"), 1)
        originals = library.get_constant_names_to_original_fqns()
        constants = {name: weights[f"{part}.{original}"] for name, original in originals.items()}
        library.update_constant_buffer(constants, False, True, True)  # the library reads ours: no copy
        libraries[part] = library
    return libraries, weights


def attend_with(kv_caches: Sequence[torch.Tensor], *shape: torch.Tensor) -> Attend:
    """`attend` for a module's layers, in order, as calls of the operator. kv_caches: one a layer, each [2, num_blocks,
    block_size, num_kv_heads, head_dim].   shape: query_start_loc [B + 1], seq_lens [B], block_tables [B, M] and slot_mapping
    [T] of the batch, as in AttentionMetadata."""
    from minivllm.attention.cpu import NO_WINDOW

    caches = iter(kv_caches)

    def attend(*qkv: torch.Tensor, scale: float, sliding_window: int | None) -> torch.Tensor:
        window = NO_WINDOW if sliding_window is None else sliding_window
        out: torch.Tensor = torch.ops.minivllm.cpu_attention(*qkv, next(caches), *shape, scale, window)
        return out

    return attend


def batch_shape(meta: AttentionMetadata) -> tuple[torch.Tensor, ...]:
    """What `attend_with` takes of a batch."""
    return meta.query_start_loc, meta.seq_lens, meta.block_tables, meta.slot_mapping


def open_dimensions() -> tuple[dict[int, Any], tuple[Any, ...], dict[int, Any], dict[int, Any]]:
    """Of tensors with a row for each token; of `batch_shape`; of one KV cache; of rows that logits are made of."""
    from torch.export import Dim

    names = ("tokens", "starts", "requests", "table", "blocks", "block_size", "rows")
    tokens, starts, requests, table, blocks, block_size, rows = (Dim(name, min=1, max=1 << 24) for name in names)
    shape = {0: starts}, {0: requests}, {0: requests, 1: table}, {0: tokens}
    return {0: tokens}, shape, {1: blocks, 2: block_size}, {0: rows}


def example_batch(
    config: ModelConfig, dtype: torch.dtype, num_tokens: int = EXAMPLE_TOKENS
) -> tuple[torch.Tensor, AttentionMetadata, list[torch.Tensor]]:
    """Positions [num_tokens], shape, and a cache for each layer, of a batch: decodes of one token each, in blocks of their own,
    and a prompt of the rest."""
    decodes, block_size = num_tokens // 2, 16
    blocks_of_prompt = -(-(num_tokens - decodes) // block_size)
    tables = np.zeros((decodes + 1, blocks_of_prompt + 1), dtype=np.int32)  # tracing takes a dimension of 1 for a constant
    tables[:decodes, 0] = np.arange(1, decodes + 1)
    tables[decodes, :-1] = np.arange(decodes + 1, decodes + 1 + blocks_of_prompt)
    positions = np.array([0] * decodes + list(range(num_tokens - decodes)))
    starts = np.array([*range(decodes + 1), num_tokens], dtype=np.int32)
    seq_lens = np.array([1] * decodes + [num_tokens - decodes], dtype=np.int32)
    owners = np.array([*range(decodes), *[decodes] * (num_tokens - decodes)])
    slots = tables[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size
    put = torch.from_numpy
    tensors = put(starts), put(seq_lens), put(tables), put(slots)
    meta = AttentionMetadata(decodes, num_tokens, *tensors)
    shape = (2, 1 + decodes + blocks_of_prompt, block_size, config.num_kv_heads, config.head_dim)
    caches = [torch.zeros(shape, dtype=dtype) for _ in range(config.num_layers)]
    return put(positions), meta, caches


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """The middle row's, of [rows, n]: in bfloat16 some tokens lead to hidden states that rounding turns around, eager and
    compiled alike."""
    ours, reference = ours.float(), reference.float()
    return float(((reference - ours).norm(dim=-1) / reference.norm(dim=-1)).median())


def most_error(dtype: torch.dtype) -> float:
    """What rounding may explain."""
    return 1e-3 if dtype == torch.float32 else 0.3


def _aot_compile(program: Any, options: dict[str, Any]) -> Sequence[Any]:
    """The files and constants inductor makes of an exported program."""
    from torch._inductor import aot_compile, exc

    arguments, keywords = program.example_inputs
    try:
        return aot_compile(program.module(check_guards=False), arguments, keywords, options=options)
    except (exc.InvalidCxxCompiler, exc.CppCompileError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"Compiling needs a C++ compiler that torch can use ({reason}). Install g++ or clang++, or go on without:"
            " the engine runs eager."
        ) from error


def _collect(made: Sequence[Any], target: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Move the library to `target`.so, the list of the operators it calls beside it; yield its constants."""
    for item in made:
        if isinstance(item, str):
            if item.endswith((".wrapper.so", ".wrapper.json")):
                Path(item).rename(target.with_suffix(Path(item).suffix))
            continue
        for name, (tensor, _) in item.items():
            if tensor.is_mkldnn:
                raise ValueError("On this processor torch keeps packed weights in a form that cannot be saved: it runs eager.")
            yield name, tensor.detach()


def _save_weights(weights: dict[str, torch.Tensor], num_mapped: int, folder: Path) -> None:
    """All tensors, as they lie in memory (strides are part of what was compiled), one after another."""
    index, position = [], 0
    files = sorted(path.name for path in folder.iterdir())  # a library without its list of operators fails in its first step
    with (folder / _WEIGHTS).open("wb") as file:
        for i, (name, tensor) in enumerate(weights.items()):
            position = file.seek(-(-position // _ALIGNMENT) * _ALIGNMENT)
            size = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            memory = tensor.as_strided((size,), (1,)).contiguous().view(torch.uint8).numpy()
            entry = {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            place = {"position": position, "num_bytes": memory.nbytes, "mapped": i < num_mapped}
            index.append(entry | {"stride": list(tensor.stride())} | place)
            file.write(memory.data)
            position += memory.nbytes
    (folder / _INDEX).write_text(json.dumps({"files": files, "tensors": index}) + "\n", encoding="utf-8")


def _load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Those that are to be mapped; the rest, which each step reads from end to end, in memory of our own, where the system has
    large pages."""
    listed = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    if missing := [name for name in listed["files"] if not (folder / name).is_file()]:
        raise ValueError(f"{missing[0]} is missing")
    index, path = listed["tensors"], folder / _WEIGHTS
    end = index[-1]["position"] + index[-1]["num_bytes"]
    if path.stat().st_size != end:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, not {end}.")
    first = next(entry["position"] for entry in index if not entry["mapped"])
    packed = np.empty(end - first + _ALIGNMENT, dtype=np.uint8)
    packed = packed[-packed.ctypes.data % _ALIGNMENT :][: end - first]
    with path.open("rb") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=np.uint8)
        file.seek(first)
        if file.readinto(packed.data) != len(packed):
            raise ValueError(f"{path} is cut short.")
    tensors = {}
    for entry in index:
        start = entry["position"]
        memory = mapped[start:] if start < first else packed[start - first :]
        flat = torch.from_numpy(memory[: entry["num_bytes"]]).view(getattr(torch, entry["dtype"]))
        tensors[entry["name"]] = flat.as_strided(entry["shape"], entry["stride"])
    return tensors
