"""The EAGLE head: one decoder layer that guesses the target's next hidden state, and from it the next tokens. Read together in
Lab 10. May not know the scheduler, blocks' owners, or training.

A target knows more about the next tokens than the one it says: its last hidden state (the *feature*, after the final norm: the
vector its logits are made from) leans towards several. What a feature does not hold is which token was then drawn; so the head
gets both, the feature at position p and the token at p + 1, and predicts the feature at p + 1 (EAGLE, Li et al. 2024). For
further tokens it goes on from its own predictions.

    position        p                p + 1            p + 2                     target's feature f, head's g
    head's input    f(p), x(p+1)     g(p), x^(p+2)    g(p+1), x^(p+3)           x known token, x^ draft
    head's output   g(p) -> x^(p+2)  g(p+1) -> x^(p+3)  ...                     logits: g times rows of the target's embedding

The embedding is the target's own, and so is the output matrix, of which only the rows of the most frequent tokens are used: all
49,152 rows of SmolLM2 would cost a fifth of the target's own work for each draft (the reduced vocabulary of FR-Spec, Zhao et
al. 2025, and EAGLE-3, Li et al. 2025). A token that is not among them is never drafted, which costs speed, not correctness.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from minivllm.attention.interface import AttentionBackend, AttentionMetadata, paged_attention
from minivllm.models.decoder import Attend, DecoderLayer
from minivllm.models.layers import rms_norm
from minivllm.models.linear import Linear
from minivllm.models.registry import ModelConfig
from minivllm.models.rope import inverse_frequencies, rotary_table
from minivllm.spec_decode.config import SpeculativeConfig
from minivllm.spec_decode.drafting import Progress, flat_batch, next_positions, put_ids

CONFIG, WEIGHTS = "config.json", "model.safetensors"
SHIPPED = Path(__file__).parent / "eagle_smollm2"
# Of the target: what decides the shapes of a head's tensors.
SIZES = ("hidden_size", "vocab_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
SIZES += ("attention_bias", "attention_out_bias", "mlp_bias", "qk_norm")


class EagleHead(nn.Module):
    """Empty until `load` or training fills it. config: the target's, whose sizes the layer has.

    draft_token_ids [V'] int64: the ids it can draft, most frequent first; output column i is token draft_token_ids[i].
    """

    draft_token_ids: torch.Tensor
    frequencies: torch.Tensor

    def __init__(
        self, config: ModelConfig, draft_token_ids: torch.Tensor, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        H = config.hidden_size
        self.config = replace(config, num_layers=1, sliding_window=(None,))
        self.embed_norm, self.feature_norm, self.norm = (
            nn.Parameter(torch.ones(H, dtype=dtype, device=device), requires_grad=False) for _ in range(3)
        )
        self.fc = Linear(2 * H, {"fc": H}, dtype=dtype, device=device)
        self.layer = DecoderLayer(self.config, None, dtype, device)
        self.register_buffer("draft_token_ids", draft_token_ids.to(device), persistent=False)
        self.register_buffer("frequencies", inverse_frequencies(config.rope, config.head_dim).to(device), persistent=False)

    def forward(
        self, embeds: torch.Tensor, features: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """The predicted features [T, hidden]. embeds [T, hidden]: embeddings of the tokens *after* each position; features
        [T, hidden]: the target's at the position, or the head's own."""
        eps = self.config.rms_norm_eps
        both = torch.cat([rms_norm(embeds, self.embed_norm, eps), rms_norm(features, self.feature_norm, eps)], dim=-1)
        return rms_norm(self.layer(self.fc(both), cos, sin, attend), self.norm, eps)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the checkpoint: its name there and the memory it goes to."""
        yield from (
            ("embed_norm.weight", self.embed_norm),
            ("feature_norm.weight", self.feature_norm),
            ("norm.weight", self.norm),
        )
        yield from self.fc.named_slices()
        yield from self.layer.checkpoint_tensors()

    # ---------------------------------------------------------------- files

    def save(self, folder: Path, **facts: object) -> None:
        """Write the head, in bfloat16, and its config.json with `facts` about it."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().to(torch.bfloat16).contiguous().clone() for name, tensor in self.named_tensors()}
        tensors["draft_token_ids"] = self.draft_token_ids.to(torch.int32)
        save_file(tensors, folder / WEIGHTS)
        sizes = {"method": "eagle", **{name: getattr(self.config, name) for name in SIZES}}
        sizes["draft_vocab_size"] = len(self.draft_token_ids)
        (folder / CONFIG).write_text(json.dumps(sizes | facts, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, target: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> EagleHead:
        """Raises ValueError for a folder that holds no head, or one of a target of other sizes."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
            raise ValueError(
                f"{folder} holds no EAGLE head ({CONFIG} and {WEIGHTS}). Train one with"
                " `python -m minivllm.spec_decode.train_eagle`, or use method='ngram', which needs none."
            )
        try:
            tensors = load_file(folder / WEIGHTS)
        except SafetensorError as error:
            raise ValueError(f"{folder / WEIGHTS} is damaged or cut short: {error}.") from error
        ids = tensors.pop("draft_token_ids", torch.zeros(0, dtype=torch.int32)).long()
        if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size:
            raise ValueError(
                f"{folder} drafts token ids the target does not have: its vocabulary ends at {target.vocab_size - 1}."
            )
        head = cls(target, ids, dtype, device)
        wanted = dict(head.named_tensors())
        found, shapes = ({n: list(t.shape) for n, t in tensors_.items()} for tensors_ in (tensors, wanted))
        if found != shapes:
            name = next(n for n in {**shapes, **found} if found.get(n) != shapes.get(n))
            raise ValueError(
                f"{folder}: tensor {name!r} has shape {found.get(name)}, where the target's sizes ask for {shapes.get(name)}."
                " The head was trained for another model."
            )
        with torch.no_grad():
            for name, tensor in wanted.items():
                tensor.copy_(tensors[name])
        return head.eval()


class Passes(Protocol):
    """How a head computes: operator by operator (`EagerPasses`), or as machine code (`eagle_compiled.CompiledHead`)."""

    def __call__(
        self,
        embeds: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        """Predicted features [T, hidden] of embeds and features [T, hidden] at positions [T]."""
        ...

    def logits(self, predicted: torch.Tensor) -> torch.Tensor:
        """Of predicted features [N, hidden], N >= 1: [N, V'], a column for each token that can be drafted."""
        ...


class EagerPasses:
    """rows [V', hidden]: see `draft_rows`."""

    def __init__(self, head: EagleHead, rows: torch.Tensor, backend: AttentionBackend) -> None:
        self._head, self._rows, self._backend = head, rows, backend

    def __call__(
        self,
        embeds: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        """As `Passes` says: features and embeds [T, hidden] -> [T, hidden]."""
        cos, sin = rotary_table(positions, self._head.frequencies, embeds.dtype)
        attend = partial(paged_attention, self._backend, kv_cache=kv_cache, meta=meta)
        predicted: torch.Tensor = self._head(embeds, features, cos, sin, attend)
        return predicted

    def logits(self, predicted: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> [N, V']."""
        return F.linear(predicted, self._rows)


class EagleDrafter:
    """Drafts with a head, greedy, for all requests of the batch at once.

    Its layer's keys and values lie in the target's blocks, in a cache of their own. The head's key at a position is made from
    the target's feature there *and the token after it*. That is why it runs over exactly the target's batch, one token on:
    every position the target computes gets its key in the same step, prompts included. And it is why the token after a block
    is a part of the block's name in the prefix cache when an EAGLE head is in use.
    Keys of rejected drafts are never read: the next step's positions begin where they lie, and overwrite them.
    """

    needs_hidden = True

    def __init__(
        self,
        config: SpeculativeConfig,
        target: ModelConfig,
        embedding: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        compiled: Passes | None = None,
    ) -> None:
        self.k = config.num_speculative_tokens
        self.head = EagleHead.load(head_folder(config, target), target, dtype, device)
        self.embedding, self.device = embedding, device
        self.passes = compiled or EagerPasses(self.head, draft_rows(self.head, compute_logits, dtype, device), backend)
        self.kv_config = self.head.config
        self.kv_caches: list[torch.Tensor] = []  # one; set by whoever owns the pool

    def propose(self, progress: Progress) -> list[list[int]]:
        batch, drafts = progress.batch, []
        assert progress.meta is not None, "needs_hidden"
        owner = progress.rows.repeat(np.diff(progress.token_starts))
        next_ids = put_ids(batch.token_ids[owner, progress.positions + 1], self.device)
        predicted = self._forward(next_ids, progress.hidden, progress.positions, progress.meta)
        rows = progress.gained_rows
        if not len(rows):
            return []
        predicted = predicted[torch.from_numpy(progress.last).to(self.device)]
        for ahead in range(self.k):
            ids = self.head.draft_token_ids[self.passes.logits(predicted).argmax(dim=-1)]
            drafts.append(ids)
            if ahead < self.k - 1:  # the newest token's own position, and on
                at = next_positions(batch, rows, ahead)
                positions, meta = flat_batch(batch, rows, at, np.ones_like(at), self.device)
                predicted = self._forward(ids, predicted, positions, meta)
        chains: list[list[int]] = torch.stack(drafts, dim=1).tolist()
        return chains

    def _forward(
        self, next_ids: torch.Tensor, features: torch.Tensor, positions: np.ndarray, meta: AttentionMetadata
    ) -> torch.Tensor:
        (kv_cache,), embeds = self.kv_caches, F.embedding(next_ids, self.embedding)
        return self.passes(embeds, features, torch.from_numpy(positions).to(self.device), kv_cache, meta)


def shipped_head(target: ModelConfig) -> Path | None:
    """The folder of the head in this package, if it is one for a target of these sizes."""
    facts = json.loads((SHIPPED / CONFIG).read_text(encoding="utf-8")) if (SHIPPED / CONFIG).is_file() else {}
    return SHIPPED if all(facts.get(name) == getattr(target, name) for name in SIZES) else None


def head_folder(config: SpeculativeConfig, target: ModelConfig) -> Path:
    """Where the head lies: the folder that was named, or the head in this package. Raises ValueError where that does not
    fit."""
    folder = shipped_head(target) if config.model is None else Path(config.model)
    if folder is None:
        raise ValueError(
            "speculative_config: the EAGLE head that ships with minivllm is for smollm2-135m. For another target, train one"
            " (`python -m minivllm.spec_decode.train_eagle --model ...`) and name its folder: 'model': '...'."
        )
    return folder


def draft_rows(
    head: EagleHead, compute_logits: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The rows [V', hidden] of the target's output matrix that the head drafts with, side by side in memory. They are read off
    the logits of unit vectors, some at a time: a compiled target does not show its matrix."""
    units = torch.eye(head.config.hidden_size, dtype=dtype, device=device)
    columns = [compute_logits(part)[:, head.draft_token_ids].to(dtype) for part in units.split(64)]
    return torch.cat(columns).T.contiguous()
