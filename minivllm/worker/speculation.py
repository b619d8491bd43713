"""Speculation: the model runner's drafter, what it is shown after each step, and what came of its drafts. May not know the
scheduler, or how drafts are made.

A step with drafts is like any other to the model: more rows. What differs is here: how tokens are chosen where the verification
is a part of one's own (`sample`), and what is drafted when the tokens have joined the batch (`draft`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from minivllm.attention.interface import AttentionBackend, AttentionMetadata
from minivllm.components import Components
from minivllm.config import EngineConfig
from minivllm.models.registry import ModelConfig
from minivllm.sampling.rejection import RejectionSampler
from minivllm.sampling.sampler import Sampler, SamplerOutput, SamplingMetadata
from minivllm.spec_decode.config import SpeculativeConfig
from minivllm.spec_decode.drafting import ModelDrafter, Progress
from minivllm.spec_decode.stats import SpecDecodeStats
from minivllm.worker.input_batch import InputBatch, StepInputs


class Speculation:
    """kv_config: sizes of the drafter's own KV cache, None if it has none; `kv_caches` is set by whoever owns the pool.

    `is_compiled`: the target is, so a drafter may be, too."""

    def __init__(
        self,
        config: EngineConfig,
        components: Components,
        target: ModelConfig,
        embedding: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        is_compiled: bool = False,
    ) -> None:
        settings = config.speculative_config
        assert settings is not None
        self.k = settings.num_speculative_tokens
        self.vocab_size = target.vocab_size
        self.stats = SpecDecodeStats()
        self.drafter: ModelDrafter
        if settings.method == "ngram":
            self.drafter = _RowByRow(settings, components, target.vocab_size)
        elif settings.method == "draft_model":
            from minivllm.spec_decode.draft_model import DraftModel

            self.drafter = DraftModel(settings, target, backend, dtype, device, config.load_format, config.seed)
        else:
            from minivllm.spec_decode.eagle import EagleDrafter, head_folder
            from minivllm.spec_decode.eagle_compiled import load_compiled_head

            head = load_compiled_head(config.model, head_folder(settings, target), dtype) if is_compiled else None
            self.drafter = EagleDrafter(settings, target, embedding, compute_logits, backend, dtype, device, head)
        self.needs_hidden: bool = self.drafter.needs_hidden
        self.kv_config: ModelConfig | None = self.drafter.kv_config
        self._rejection_sampler: RejectionSampler | None = None  # None: coupling, see sampling/rejection.py
        if "rejection_sampler" in components:
            self._rejection_sampler = components["rejection_sampler"]()
            self._only_greedy = not components.require("rejection_sampler", "sampling", None)

    def set_kv_caches(self, kv_caches: list[torch.Tensor]) -> None:
        """The drafter's layers, each [2, num_blocks, block_size, num_kv_heads, head_dim], under the target's block tables."""
        self.drafter.kv_caches = kv_caches

    def sample(self, logits: torch.Tensor, metadata: SamplingMetadata, sampler: Any, inputs: StepInputs) -> SamplerOutput:
        """The target's tokens for every row of logits [rows, vocab_size], drafts or not."""
        couples = self._rejection_sampler is None or (self._only_greedy and len(metadata.sampled_rows) > 0)
        if couples or not (inputs.ahead > 0).any():
            output: SamplerOutput = sampler(logits, metadata)
            return output
        own = sampler if isinstance(sampler, Sampler) else Sampler()  # a replaced one gives tokens only
        assert self._rejection_sampler is not None
        return self._rejection_sampler(logits, metadata, own, inputs.draft_ids, inputs.ahead)

    @torch.inference_mode()
    def draft(
        self,
        batch: InputBatch,
        inputs: StepInputs,
        hidden: torch.Tensor,
        meta: AttentionMetadata | None,
        gained: np.ndarray,
        last: np.ndarray,
    ) -> dict[str, list[int]]:
        """Drafts by request id, for requests inputs.rows[gained]; the newest token of each was sampled from logits row
        `last`."""
        start = time.perf_counter()
        progress = Progress(
            batch=batch,
            rows=inputs.rows,
            token_starts=inputs.token_starts,
            gained=gained,
            last=inputs.logits_indices[last],
            positions=inputs.positions,
            hidden=hidden,
            meta=meta,
        )
        chains = self.drafter.propose(progress)
        drafts = {inputs.req_ids[b]: chain for b, chain in zip(gained.tolist(), chains, strict=True) if chain}
        self.stats.draft_s += time.perf_counter() - start
        return drafts

    def count(self, inputs: StepInputs, counts: np.ndarray, seconds: float) -> None:
        """Take in a step's verifications: `counts` [S] tokens each request got."""
        num_drafts = np.bincount(inputs.sample_row_of[inputs.ahead > 0], minlength=len(counts))
        verified = num_drafts > 0
        self.stats.count(num_drafts[verified].tolist(), counts[verified].tolist())
        self.stats.target_s += seconds


class _RowByRow:
    """The `drafter` component, which knows one sequence, over a batch."""

    needs_hidden = False
    kv_config = None

    def __init__(self, config: SpeculativeConfig, components: Components, vocab_size: int) -> None:
        self.k = config.num_speculative_tokens
        self.vocab_size = vocab_size
        part = components.pick("drafter")
        self.part = part(config.prompt_lookup_max, config.prompt_lookup_min) if isinstance(part, type) else part
        self.is_replaced = "drafter" in components
        self.kv_caches: list[torch.Tensor] = []  # it reads tokens only

    def propose(self, progress: Progress) -> list[list[int]]:
        batch = progress.batch
        chains = []
        for row in progress.gained_rows.tolist():
            known = batch.token_ids[row, : batch.num_tokens[row]]
            chain = self.part.propose(known.copy() if self.is_replaced else known, self.k)
            chains.append(self._checked(chain, len(known)) if self.is_replaced else chain)
        return chains

    def _checked(self, chain: Any, length: int) -> list[int]:
        """A replaced part's answer, before its numbers are used as indices. Raises ValueError naming it."""
        try:
            ids = [int(token_id) for token_id in chain]
        except (TypeError, ValueError):
            ids = [-1]
        if len(ids) <= self.k and all(0 <= token_id < self.vocab_size for token_id in ids):
            return ids
        part = type(self.part)
        raise ValueError(
            f"The drafter {part.__module__}.{part.__qualname__} proposed {chain!r:.80} after {length} tokens; it must give a"
            f" list of at most {self.k} token ids below {self.vocab_size}."
        )
