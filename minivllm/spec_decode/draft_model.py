"""Drafts from a smaller model with the same vocabulary, greedy, for all requests of the batch at once. Labs: shown in Lab 10.
May not know the scheduler.

Its KV cache lives under the target's block tables and **catches up by itself**. The rule: after every step it holds each known
token of every request in the step, no matter what the step was. The batch keeps one number for each request,
`num_drafter_tokens`: how many leading tokens it holds. One pass computes what is missing, and the drafts go on from there:

    known tokens after the step       t t t t t t t n           n is the newest, sampled just now
    num_drafter_tokens = 5            . . . . .
    pass 1 computes                             t t n           -> draft d1
    pass 2 .. k                                       d1 d2 ..  -> d2 .. dk: these keys are kept, too

    - a chunk of a prompt: pass 1 computes the chunk, and nothing is drafted
    - drafts accepted: their keys are there already; at least the newest token is missing
    - drafts rejected: everything from the first wrong one on counts as missing (min(held, known - 1)), and is overwritten
    - a hit in the prefix cache: a block was published when the target's step was planned, and filled in all layers in that
      step; so cached tokens are held (`num_drafter_tokens` starts at the number of cached ones)
    - preemption: the request comes back as a new one, with what the cache still has
"""

from __future__ import annotations

import numpy as np
import torch

from minivllm.attention.interface import AttentionBackend, AttentionMetadata
from minivllm.models.registry import ModelConfig
from minivllm.models.weights import load_model
from minivllm.spec_decode.config import SpeculativeConfig
from minivllm.spec_decode.drafting import Progress, flat_batch, next_positions, put_ids


class DraftModel:
    """Loads the model named by `config.model`. Raises ValueError if its vocabulary is not the target's."""

    needs_hidden = False

    def __init__(
        self,
        config: SpeculativeConfig,
        target: ModelConfig,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        load_format: str = "auto",
        seed: int = 0,
    ) -> None:
        assert config.model is not None
        self.k = config.num_speculative_tokens
        self.device = device
        load_format = load_format if load_format == "dummy" else "auto"
        self.model = load_model(config.model, dtype=dtype, device=device, load_format=load_format, seed=seed)
        self.model.attention_backend = backend
        if self.model.config.vocab_size != target.vocab_size:
            raise ValueError(
                f"speculative_config: the draft model {config.model} has {self.model.config.vocab_size} tokens in its"
                f" vocabulary, the target {target.vocab_size}. Drafts are token ids: take a model with the target's tokenizer."
            )
        self.kv_config = self.model.config
        self.kv_caches: list[torch.Tensor] = []  # set by whoever owns the pool

    def propose(self, progress: Progress) -> list[list[int]]:
        batch, drafts = progress.batch, []
        rows, starts, ends, gained = self._missing(progress)
        positions, meta = flat_batch(batch, rows, starts, ends - starts, self.device)
        ids = put_ids(batch.token_ids[rows.repeat(ends - starts), positions], self.device)
        hidden = self._forward(ids, positions, meta)
        batch.num_drafter_tokens[rows] = ends
        is_gained = gained >= 0
        rows = rows[is_gained]
        if not len(rows):
            return []
        hidden = hidden[put_ids((ends - starts).cumsum()[is_gained] - 1, self.device)]
        for ahead in range(1, self.k + 1):
            ids = self.model.logits(hidden).argmax(dim=-1)
            drafts.append(ids)
            if ahead < self.k:
                at = next_positions(batch, rows, ahead)
                positions, meta = flat_batch(batch, rows, at, np.ones_like(at), self.device)
                hidden = self._forward(ids, positions, meta)
        batch.num_drafter_tokens[rows] += self.k - 1
        chains: list[list[int]] = torch.stack(drafts, dim=1).tolist()
        return [chains[i] for i in gained[is_gained].argsort()]

    @staticmethod
    def _missing(progress: Progress) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What pass 1 computes: batch rows, their tokens from `starts` to before `ends`, and each one's place in
        progress.gained, or -1. Rows with few tokens come first, as attention wants them.

        It begins with the first token that is not held (the newest in any case: a wrong draft may be in its place), and ends
        with the last that is known, or with its chunk of a prompt.
        """
        batch, rows = progress.batch, progress.rows
        gained = np.full(len(rows), -1)
        gained[progress.gained] = np.arange(len(progress.gained))
        computed = batch.num_computed_tokens[rows] + np.diff(progress.token_starts)
        known = batch.num_tokens[rows]
        ends = np.where(gained >= 0, known, np.minimum(computed, known))
        starts = np.minimum(batch.num_drafter_tokens[rows], ends - 1)
        order = np.argsort(ends - starts, kind="stable")
        return rows[order], starts[order], ends[order], gained[order]

    def _forward(self, ids: torch.Tensor, positions: np.ndarray, meta: AttentionMetadata) -> torch.Tensor:
        hidden = self.model(ids, torch.from_numpy(positions).to(self.device), self.kv_caches, meta)
        assert isinstance(hidden, torch.Tensor)
        return hidden
