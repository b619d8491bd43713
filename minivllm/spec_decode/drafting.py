"""What a drafter is to the model runner, and the batches that drafters with a KV cache of their own compute. May not know the
scheduler.

    after a step's tokens are known:   drafter.propose(Progress) -> drafts [S, k], one row for each request that got tokens

A drafter's cache has the target's block tables: its layers are further layers of the same blocks. So whatever happens to a
block (shared, cached, freed, taken away) happens to its keys and values in all layers at once, and no drafter needs to be told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from minivllm.attention.interface import AttentionMetadata
from minivllm.attention.rows import attention_rows
from minivllm.models.registry import ModelConfig


class Batch(Protocol):
    """What drafters read of the worker's `InputBatch`: arrays with a row for each request."""

    token_ids: np.ndarray  # [rows, max_model_len] int32: known tokens, then anything
    num_tokens: np.ndarray
    num_computed_tokens: np.ndarray
    num_drafter_tokens: np.ndarray
    block_table: np.ndarray  # [rows, max_blocks] int32, 0-padded
    block_size: int


@dataclass(slots=True)
class Progress:
    """A step whose tokens have just joined the batch.

    rows [B]: the batch rows of the step's requests.   token_starts [B + 1]: where each one's tokens lie among the step's T.
    gained [S]: which of the B got tokens.   last [S]: which of the T tokens each one's newest token was sampled from.
    hidden: the target's hidden states [T, hidden], after the final norm.   positions: of the T tokens.
    meta: what the target's attention was given.
    """

    batch: Batch
    rows: np.ndarray
    token_starts: np.ndarray
    gained: np.ndarray
    last: np.ndarray
    positions: np.ndarray
    hidden: torch.Tensor
    meta: AttentionMetadata | None

    @property
    def gained_rows(self) -> np.ndarray:
        rows: np.ndarray = self.rows[self.gained]
        return rows


class ModelDrafter(Protocol):
    """A drafter as the runner holds it. `needs_hidden`: whether it reads `Progress.hidden` and `meta`.   kv_config: the sizes
    of its own cache, None if it has none.   kv_caches: that cache, set by whoever owns the pool."""

    kv_caches: list[torch.Tensor]

    @property
    def needs_hidden(self) -> bool: ...

    @property
    def kv_config(self) -> ModelConfig | None: ...

    def propose(self, progress: Progress) -> list[list[int]]:
        """Drafts for each request in `gained`, at most k; [] for none."""
        ...


FEW = 4  # tokens; a request that computes more of them is a prefill to attention


def flat_batch(
    batch: Batch, rows: np.ndarray, starts: np.ndarray, num_tokens: np.ndarray, device: torch.device
) -> tuple[np.ndarray, AttentionMetadata]:
    """Positions [T], and the metadata, of a batch that computes tokens starts .. starts + num_tokens - 1 of each row (all [B]),
    rows of FEW tokens or less first.

    Those are decodes, with a row of attention for each token, as in a step that verifies (`worker.input_batch.StepInputs`).
    """
    owner = np.arange(len(rows)).repeat(num_tokens)
    token_starts = np.concatenate([[0], num_tokens.cumsum()])
    positions = np.arange(len(owner)) - token_starts[owner] + starts[owner]
    num_single = int((num_tokens <= FEW).sum())
    seq_lens = starts + num_tokens
    tables = batch.block_table[rows, : -(-int(seq_lens.max()) // batch.block_size)]
    slots = tables[owner, positions // batch.block_size].astype(np.int64) * batch.block_size + positions % batch.block_size
    shape = attention_rows(num_tokens, num_single, token_starts, positions, seq_lens, tables)
    return positions, AttentionMetadata(
        num_decodes=int(token_starts[num_single]),
        num_tokens=len(positions),
        query_start_loc=_put(shape["query_start_loc"], device),
        seq_lens=_put(shape["seq_lens"], device),
        block_tables=_put(np.ascontiguousarray(shape["block_tables"]), device),
        slot_mapping=_put(slots, device),
    )


def next_positions(batch: Batch, rows: np.ndarray, ahead: int) -> np.ndarray:
    """Position `ahead` places after each row's newest token, where a draft goes. Near max_model_len the last position stands
    for those behind it: it is sampled, never computed, so its slot is free for what nobody will read."""
    last: int = batch.token_ids.shape[1] - 1
    positions: np.ndarray = np.minimum(batch.num_tokens[rows] - 1 + ahead, last)
    return positions


def put_ids(token_ids: np.ndarray, device: torch.device) -> torch.Tensor:
    return _put(token_ids.astype(np.int64), device)


def _put(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
