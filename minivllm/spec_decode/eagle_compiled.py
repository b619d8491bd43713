"""The EAGLE head as machine code for CPUs. `minivllm compile` makes it beside the decoder; `eagle.py` drafts with it where
it is there. May not know the scheduler.

A draft costs a pass of one layer over one token: some forty eager kernels of a few microseconds' work each, which take 2 to 3
ms on 2 CPU cores. As one library they take 0.5 ms, and the 6,144 rows that a draft is chosen from 0.2 ms.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from minivllm.attention.interface import AttentionMetadata
from minivllm.models import compile_cache
from minivllm.models.aot import (
    DTYPES,
    EXAMPLE_TOKENS,
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
from minivllm.models.hub import resolve_model
from minivllm.models.registry import ModelConfig
from minivllm.models.rope import rotary_table
from minivllm.models.weights import load_model
from minivllm.spec_decode import eagle

logger = logging.getLogger("minivllm")

PARTS = ("head", "draft")


class CompiledHead:
    """What `compile_head` left in a folder, loaded: the `Passes` of a drafter. OSError, ValueError or RuntimeError for a folder
    that is broken."""

    def __init__(self, folder: Path) -> None:
        self._libraries, self._weights = load_parts(folder, PARTS)

    def __call__(
        self,
        embeds: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        """As `EagleHead.forward`: predicted features [T, hidden] of embeds and features [T, hidden] at positions [T]."""
        arguments = [embeds, features, positions, *batch_shape(meta), kv_cache]
        predicted: torch.Tensor = self._libraries["head"].run(arguments)[0]
        return predicted

    def logits(self, predicted: torch.Tensor) -> torch.Tensor:
        """Of predicted features [N, hidden], N >= 1: [N, V'], a column for each token that can be drafted."""
        logits: torch.Tensor = self._libraries["draft"].run([predicted])[0]
        return logits


def load_compiled_head(model: str | Path, head: Path, dtype: torch.dtype) -> CompiledHead | None:
    """The compiled head in folder `head` for a target, or None where there is none that fits: it drafts eager then, and a line
    in the log says how to get it."""
    if dtype not in DTYPES or not (head / eagle.CONFIG).is_file() or not (head / eagle.WEIGHTS).is_file():
        return None  # `EagleHead.load` says what is missing
    command = f"minivllm compile {model} --dtype {str(dtype).removeprefix('torch.')}"
    command += "" if head == eagle.SHIPPED else f" --eagle-head {head}"
    label, key = _label_and_key(model, head, dtype)
    folder = compile_cache.find(label, key)
    if folder is None:
        why_not = compile_cache.why_not(label, key)
        logger.info("The EAGLE head drafts eager: %s. Once, for more speed: %s", why_not, command)
        return None
    try:
        return CompiledHead(folder)
    except compile_cache.BROKEN as error:
        reason = compile_cache.first_line(error)
        logger.warning(
            "The EAGLE head drafts eager: what is compiled in %s is broken (%s). Delete the folder, then: %s",
            folder, reason, command,
        )  # fmt: skip
        return None


def compile_head(model: str | Path, head: Path, dtype: torch.dtype, say: Callable[[str], None] = lambda line: None) -> Path:
    """The folder of the compiled head in folder `head` for a target, made if it is not there: a minute. Raises ValueError for
    a head that is not the target's, or a machine it cannot be made for."""

    def fill(folder: Path) -> None:
        say("loading the target's embedding")
        target = load_model(resolve_model(model), dtype=dtype)
        with torch.no_grad():
            loaded = eagle.EagleHead.load(head, target.config, dtype)
            rows = eagle.draft_rows(loaded, target.logits, dtype, torch.device("cpu"))
            compile_parts(_parts(loaded, target.embed_tokens, rows), folder, say)
            say("comparing with the eager head")
            _compare(loaded, target.embed_tokens, rows, CompiledHead(folder))

    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype} is not compiled: the compiled head serves bfloat16 and float32.")
    eagle.EagleHead.load(head, ModelConfig.from_folder(resolve_model(model)), dtype)  # before anything is made
    return compile_cache.make(*_label_and_key(model, head, dtype), say, fill)


def _label_and_key(model: str | Path, head: Path, dtype: torch.dtype) -> tuple[str, dict[str, object]]:
    source, here = resolve_model(model), Path(__file__)
    code = (*compile_cache.SOURCES, here, here.with_name("eagle.py"))
    files = compile_cache.digest_of_files([head / eagle.CONFIG, head / eagle.WEIGHTS])
    what = {"what": "EAGLE head", "head": str(head.resolve()), "head's files": files}
    return compile_cache.make_label(model, dtype, "eagle"), compile_cache.make_key(source, dtype, code, what)


class _Pass(nn.Module):
    def __init__(self, head: eagle.EagleHead) -> None:
        super().__init__()
        self.head = head

    def forward(
        self,
        embeds: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        cos, sin = rotary_table(positions, self.head.frequencies, embeds.dtype)
        attend = attend_with([kv_cache], query_start_loc, seq_lens, block_tables, slot_mapping)
        predicted: torch.Tensor = self.head(embeds, features, cos, sin, attend)
        return predicted


class _Draft(nn.Module):
    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.rows = nn.Parameter(rows, requires_grad=False)

    def forward(self, predicted: torch.Tensor) -> torch.Tensor:
        return F.linear(predicted, self.rows)


def _parts(head: eagle.EagleHead, embedding: torch.Tensor, rows: torch.Tensor) -> Iterator[Part]:
    tokens, shape, cache, of_logits = open_dimensions()
    positions, meta, (kv_cache,) = example_batch(head.config, embedding.dtype)
    x = F.embedding(positions, embedding)
    arguments = (x, x.clone(), positions, *batch_shape(meta), kv_cache)
    yield Part("head", _Pass(head), arguments, (tokens, tokens, tokens, *shape, cache))
    yield Part("draft", _Draft(rows), (x,), (of_logits,))


def _compare(head: eagle.EagleHead, embedding: torch.Tensor, rows: torch.Tensor, compiled: CompiledHead) -> None:
    """Raises ValueError unless both compute the same, within the rounding of the dtype, for batches of several sizes."""
    dtype = embedding.dtype
    for num_tokens in (1, 5, EXAMPLE_TOKENS, 2 * EXAMPLE_TOKENS + 7):
        ids = torch.arange(1, num_tokens + 1) * 7919 % len(embedding)
        embeds, features = F.embedding(ids, embedding), F.embedding(ids.flip(0), embedding)
        positions, meta, (kv_cache,) = example_batch(head.config, dtype, num_tokens)
        ours = compiled.logits(compiled(embeds, features, positions, kv_cache, meta))
        positions, meta, (kv_cache,) = example_batch(head.config, dtype, num_tokens)
        reference = F.linear(_Pass(head)(embeds, features, positions, *batch_shape(meta), kv_cache), rows)
        error = relative_error(ours, reference)
        if not error < most_error(dtype):
            raise ValueError(
                f"The compiled EAGLE head does not compute what the eager one does ({num_tokens} tokens: relative error"
                f" {error:.2g}, at most {most_error(dtype)}): it is not kept, and drafts are made eager."
            )
