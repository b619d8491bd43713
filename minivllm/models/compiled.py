"""The compiled decoder for CPUs: the whole decoder as one shared library, for batches of any size. `compile_cache.py` keeps it.

Eager PyTorch runs a layer as some fifteen kernels and reads the weights of its matrix products at half of the memory's speed.
TorchInductor's own matrix kernels want the weights packed in the order they are read (for AMX, tiles of 32 x 16 pairs), run at
the memory's speed, and take norms, rope, silu and residuals along. `torch.compile` would pay for that in every process;
AOTInductor does it once, ahead of time:

    torch.export      the decoder -> a graph, the number of tokens left open, attention as one operator of ours
    freezing          weights become constants of the graph, and are packed
    aot_compile       the graph -> C++ -> decoder.so, logits.so; the packed weights -> weights.bin

The library calls `minivllm::cpu_attention` (`attention/cpu.py`) once a layer: prefill and decode rows in one call, keys and
values written in place. The embedding is looked up outside, in a mapped file: a step touches a row a token of it. So one copy
of the weights is in memory, and the decoder's own is never loaded. May not know the engine.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from minivllm.attention.interface import AttentionBackend, AttentionMetadata
from minivllm.models.decoder import Decoder
from minivllm.models.int4 import EITHER, FEW_ROWS, PACKED, UNPACKED, set_form
from minivllm.models.registry import ModelConfig

DTYPES = (torch.float32, torch.bfloat16)  # those the attention operator has kernels for
PARTS = ("decoder", "logits")
FEW = "few_rows"  # with int4 weights a third: the decoder for up to FEW_ROWS tokens
_WEIGHTS, _INDEX = "weights.bin", "weights.json"
_ALIGNMENT = 64  # a cache line; what the kernels load is then never split
_EXAMPLE_TOKENS = 32  # kernels fit any number; block sizes are chosen with this one in mind
_INDUCTOR: dict[str, Any] = {
    "freezing": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP",  # one choice: nothing is timed, so a busy machine compiles the same kernels
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.package_constants_on_disk_format": "pickle_weights",
}


# Inductor's own int4 kernel unpacks a whole panel of weights before it multiplies; torch's does it on the way.
_INDUCTOR_INT4 = _INDUCTOR | {"max_autotune_gemm_backends": "ATEN"}


class CompiledDecoder:
    """What `compile_decoder` left in a folder, loaded. It computes what the eager `Decoder` of the same weights does, with the
    CPU backend's attention; it has no `aux_layers` and no `full_forward`. OSError, ValueError or RuntimeError for a folder
    that is broken.
    """

    def __init__(self, folder: Path, config: ModelConfig, attention_backend: AttentionBackend) -> None:
        self.config = config
        self.attention_backend = attention_backend  # whose operator the library calls
        torch.cpu._init_amx()  # the system grants a process its tile registers on demand, and kills one that did not ask
        weights = _load_weights(folder)
        self.embed_tokens = weights.pop("embed_tokens")
        self._libraries = {}
        for part in (*PARTS, *([FEW] if (folder / f"{FEW}.so").exists() else [])):
            library = torch._C._aoti.AOTIModelContainerRunnerCpu(str(folder / f"{part}.so"), 1)
            names = library.get_constant_names_to_original_fqns()
            constants = {name: weights[f"{part}.{original}"] for name, original in names.items()}
            library.update_constant_buffer(constants, False, True, True)  # the library reads ours: no copy
            self._libraries[part] = library
        self._weights = weights  # the libraries hold no reference

    def __call__(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        meta: AttentionMetadata,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `Decoder.forward`."""
        x = inputs_embeds if input_ids is None else nn.functional.embedding(input_ids, self.embed_tokens)
        assert x is not None, "input_ids or inputs_embeds"
        arguments = [x, positions, meta.query_start_loc, meta.seq_lens, meta.block_tables, meta.slot_mapping, *kv_caches]
        few = self._libraries.get(FEW) if len(x) <= FEW_ROWS else None
        hidden: torch.Tensor = (few or self._libraries["decoder"]).run(arguments)[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `Decoder.logits`: hidden [N, hidden_size] -> [N, vocab_size]."""
        if len(hidden) == 0:  # the library's batch has a row at least
            return hidden.new_empty(0, self.config.vocab_size)
        logits: torch.Tensor = self._libraries["logits"].run([hidden])[0]
        return logits


def compile_decoder(decoder: Decoder, folder: Path, say: Callable[[str], None] = lambda line: None) -> None:
    """Compile a decoder with its weights into an existing folder. Minutes; `say` is told each stage. Raises ValueError for a
    model that cannot be compiled here, naming the reason, and where the result does not compute what the decoder does."""
    from torch._inductor.utils import fresh_cache

    dtype = decoder.embed_tokens.dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype} is not compiled: the compiled decoder serves bfloat16 and float32.")
    weights = {"embed_tokens": decoder.embed_tokens.detach()}
    scratch = folder / "inductor"
    scratch.mkdir()
    with torch.no_grad(), fresh_cache(dir=str(scratch)):
        for part, module, arguments, shapes, options in _parts(decoder):
            say(f"tracing {part}")
            program = torch.export.export(module, arguments, dynamic_shapes=shapes, strict=False)
            say(f"compiling {part}")
            for name, tensor in _collect(_aot_compile(program, options), folder / part):
                weights[f"{part}.{name}"] = tensor
    scratch.rmdir()
    set_form(decoder, EITHER)
    say("saving the packed weights")
    _save_weights(weights, folder)
    say("comparing with the eager decoder")
    _compare(decoder, CompiledDecoder(folder, decoder.config, decoder.attention_backend))


class _Layers(nn.Module):
    """The decoder as a graph of tensors: from embeddings to the last norm."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_caches: list[torch.Tensor],
    ) -> torch.Tensor:
        from minivllm.attention.cpu import NO_WINDOW

        caches, shape = iter(kv_caches), (query_start_loc, seq_lens, block_tables, slot_mapping)

        def attend(*qkv: torch.Tensor, scale: float, sliding_window: int | None) -> torch.Tensor:
            window = NO_WINDOW if sliding_window is None else sliding_window
            out: torch.Tensor = torch.ops.minivllm.cpu_attention(*qkv, next(caches), *shape, scale, window)
            return out

        return self.decoder.run_layers(x, positions, attend)


class _Logits(nn.Module):
    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.decoder.logits(hidden)


def _parts(decoder: Decoder) -> Iterator[tuple[str, nn.Module, tuple[Any, ...], Any, dict[str, Any]]]:
    """(name, module, example arguments, their open dimensions, inductor's options) of each library. Each is to be traced before
    the next is asked for: int4 weights are in another form then."""
    from torch.export import Dim

    names = ("tokens", "starts", "requests", "table", "blocks", "block_size", "rows")
    tokens, starts, requests, table, blocks, block_size, rows = (Dim(name, min=1, max=1 << 24) for name in names)
    positions, meta, kv_caches = _example_batch(decoder, _EXAMPLE_TOKENS)
    x = nn.functional.embedding(positions, decoder.embed_tokens)
    shape = (meta.query_start_loc, meta.seq_lens, meta.block_tables, meta.slot_mapping)
    open_dimensions = ({0: tokens}, {0: tokens}, {0: starts}, {0: requests}, {0: requests, 1: table}, {0: tokens})
    caches = [{1: blocks, 2: block_size}] * len(kv_caches)
    arguments = (x, positions, *shape, kv_caches)
    has_int4 = set_form(decoder, UNPACKED)
    yield "decoder", _Layers(decoder), arguments, (*open_dimensions, caches), _INDUCTOR
    if has_int4:
        set_form(decoder, PACKED)
        yield FEW, _Layers(decoder), arguments, (*open_dimensions, caches), _INDUCTOR_INT4
    yield "logits", _Logits(decoder), (x,), ({0: rows},), _INDUCTOR


def _example_batch(decoder: Decoder, num_tokens: int) -> tuple[torch.Tensor, AttentionMetadata, list[torch.Tensor]]:
    """Positions, shape and caches of a batch: decodes of one token each, in blocks of their own, and a prompt of the rest."""
    config, decodes, block_size = decoder.config, num_tokens // 2, 16
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
    caches = [torch.zeros(shape, dtype=decoder.embed_tokens.dtype) for _ in range(config.num_layers)]
    return put(positions), meta, caches


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


def _save_weights(weights: dict[str, torch.Tensor], folder: Path) -> None:
    """All tensors, as they lie in memory (strides are part of what was compiled), one after another."""
    index, position = [], 0
    with (folder / _WEIGHTS).open("wb") as file:
        for name, tensor in weights.items():
            position = file.seek(-(-position // _ALIGNMENT) * _ALIGNMENT)
            size = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            memory = tensor.as_strided((size,), (1,)).contiguous().view(torch.uint8).numpy()
            entry = {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "position": position}
            index.append(entry | {"shape": list(tensor.shape), "stride": list(tensor.stride()), "num_bytes": memory.nbytes})
            file.write(memory.data)
            position += memory.nbytes
    (folder / _INDEX).write_text(json.dumps(index) + "\n", encoding="utf-8")


def _load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The embedding mapped; the rest, which each step reads from end to end, in memory of our own, where the system has large
    pages."""
    index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    path = folder / _WEIGHTS
    end = index[-1]["position"] + index[-1]["num_bytes"]
    if path.stat().st_size != end:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, not {end}.")
    first = index[1]["position"]
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


@torch.inference_mode()
def _compare(decoder: Decoder, compiled: CompiledDecoder) -> None:
    """Raises ValueError unless both compute the same, within the rounding of the dtype, for batches of several sizes."""
    limit = 1e-3 if decoder.embed_tokens.dtype == torch.float32 else 0.3
    for num_tokens in (1, 5, _EXAMPLE_TOKENS, 2 * _EXAMPLE_TOKENS + 7):
        logits = []
        input_ids = torch.arange(1, num_tokens + 1) * 7919 % decoder.config.vocab_size
        for model in (decoder, compiled):
            positions, meta, kv_caches = _example_batch(decoder, num_tokens)
            hidden = model(input_ids, positions, kv_caches, meta)
            assert isinstance(hidden, torch.Tensor)
            logits.append(model.logits(hidden).float())
        eager, ours = logits
        # The middle row's: in bfloat16 some tokens lead to hidden states that rounding turns around, eager and compiled alike.
        error = float(((eager - ours).norm(dim=-1) / eager.norm(dim=-1)).median())
        if not error < limit:  # NaN is no success either
            raise ValueError(
                f"The compiled decoder does not compute what the eager one does ({num_tokens} tokens: relative error"
                f" {error:.2g}, at most {limit}): it is not kept. The engine runs eager."
            )
