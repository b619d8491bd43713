"""The compiled decoder for CPUs: the whole decoder as one shared library, for batches of any size. `compile_cache.py` keeps it.

Eager PyTorch runs a layer as some fifteen kernels and reads the weights of its matrix products at half of the memory's speed.
TorchInductor's own matrix kernels want the weights packed in the order they are read (for AMX, tiles of 32 x 16 pairs), run at
the memory's speed, and take norms, rope, silu and residuals along. `torch.compile` would pay for that in every process;
AOTInductor does it once, ahead of time (`aot.py`).

The embedding is looked up outside the library, in a mapped file: a step touches a row a token of it. So one copy of the weights
is in memory, and the decoder's own is never loaded. May not know the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minivllm.attention.interface import AttentionBackend, AttentionMetadata
from minivllm.models.aot import (
    DTYPES,
    EXAMPLE_TOKENS,
    INT4,
    Part,
    attend_with,
    batch_shape,
    compile_parts,
    example_batch,
    load_parts,
    most_error,
    open_dimensions,
    relative_error,
)
from minivllm.models.decoder import Decoder
from minivllm.models.int4 import EITHER, FEW_ROWS, PACKED, UNPACKED, set_form
from minivllm.models.registry import ModelConfig

PARTS = ("decoder", "logits")
FEW = "few_rows"  # with int4 weights a third: the decoder for up to FEW_ROWS tokens


class CompiledDecoder:
    """What `compile_decoder` left in a folder, loaded. It computes what the eager `Decoder` of the same weights does, with the
    CPU backend's attention; it has no `aux_layers` and no `full_forward`. OSError, ValueError or RuntimeError for a folder
    that is broken.
    """

    def __init__(self, folder: Path, config: ModelConfig, attention_backend: AttentionBackend) -> None:
        self.config = config
        self.attention_backend = attention_backend  # whose operator the library calls
        few = [FEW] if (folder / f"{FEW}.so").exists() else []
        self._libraries, self._weights = load_parts(folder, [*PARTS, *few])
        self.embed_tokens = self._weights["embed_tokens"]

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
        few = self._libraries.get(FEW) if len(x) <= FEW_ROWS else None
        library = few or self._libraries["decoder"]
        hidden: torch.Tensor = library.run([x, positions, *batch_shape(meta), *kv_caches])[0]
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
    dtype = decoder.embed_tokens.dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype} is not compiled: the compiled decoder serves bfloat16 and float32.")
    compile_parts(_parts(decoder), folder, say, {"embed_tokens": decoder.embed_tokens})
    set_form(decoder, EITHER)
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
        attend = attend_with(kv_caches, query_start_loc, seq_lens, block_tables, slot_mapping)
        return self.decoder.run_layers(x, positions, attend)


class _Logits(nn.Module):
    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.decoder.logits(hidden)


def _parts(decoder: Decoder) -> Iterator[Part]:
    """Each is to be traced before the next is asked for: int4 weights are in another form then."""
    tokens, shape, cache, rows = open_dimensions()
    positions, meta, kv_caches = example_batch(decoder.config, decoder.embed_tokens.dtype)
    x = nn.functional.embedding(positions, decoder.embed_tokens)
    arguments: tuple[Any, ...] = (x, positions, *batch_shape(meta), kv_caches)
    dimensions = (tokens, tokens, *shape, [cache] * len(kv_caches))
    has_int4 = set_form(decoder, UNPACKED)
    yield Part("decoder", _Layers(decoder), arguments, dimensions)
    if has_int4:
        set_form(decoder, PACKED)
        yield Part(FEW, _Layers(decoder), arguments, dimensions, INT4)
    yield Part("logits", _Logits(decoder), (x,), (rows,))


@torch.inference_mode()
def _compare(decoder: Decoder, compiled: CompiledDecoder) -> None:
    """Raises ValueError unless both compute the same, within the rounding of the dtype, for batches of several sizes."""
    dtype = decoder.embed_tokens.dtype
    for num_tokens in (1, 5, EXAMPLE_TOKENS, 2 * EXAMPLE_TOKENS + 7):
        logits = []
        input_ids = torch.arange(1, num_tokens + 1) * 7919 % decoder.config.vocab_size
        for model in (decoder, compiled):
            positions, meta, kv_caches = example_batch(decoder.config, dtype, num_tokens)
            hidden = model(input_ids, positions, kv_caches, meta)
            assert isinstance(hidden, torch.Tensor)
            logits.append(model.logits(hidden))
        error = relative_error(logits[1], logits[0])
        if not error < most_error(dtype):  # NaN is no success either
            raise ValueError(
                f"The compiled decoder does not compute what the eager one does ({num_tokens} tokens: relative error"
                f" {error:.2g}, at most {most_error(dtype)}): it is not kept. The engine runs eager."
            )
