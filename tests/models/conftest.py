"""Tiny random models of each family, and a paged run of one, for the tests of models/."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from minivllm.attention.interface import AttentionMetadata
from minivllm.models.decoder import Decoder

if TYPE_CHECKING:  # importing it takes seconds, which tests without a model of its need not spend
    import transformers

BLOCK_SIZE = 4
SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, head_dim of its own": ("Llama", {"head_dim": 24}),
    "llama, linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama, llama3 rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, window of 7": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen2, windows from layer 1": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3, biases and mixed layers": (
        "Qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}

MakeModel = Callable[..., "tuple[Path, transformers.PreTrainedModel]"]


def tiny_model(kind: str, **overrides: Any) -> transformers.PreTrainedModel:
    """A random transformers model in float32 whose every weight matters: biases and norms are not left at 0 and 1."""
    import transformers

    name, settings = FAMILIES[kind]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **settings, **overrides})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            centre = 1.0 if parameter.dim() == 1 and bool((parameter == 1).all()) else 0.0
            parameter.normal_(centre, 0.2)
    return model


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """make_model(kind, **config overrides) -> (folder of its checkpoint, the transformers model)."""

    def make(kind: str = "llama", max_shard_size: str = "1GB", **overrides: Any) -> tuple[Path, transformers.PreTrainedModel]:
        model = tiny_model(kind, **overrides)
        folder = tmp_path / "checkpoint"
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return folder, model

    return make


def make_metadata(computed: Sequence[int], new: Sequence[int], tables: torch.Tensor) -> AttentionMetadata:
    """The metadata of a step: row i has `computed[i]` tokens in its blocks and adds `new[i]`; rows with one come first."""
    seq_lens = np.array([c + n for c, n in zip(computed, new, strict=True)], dtype=np.int32)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    slots = [
        int(tables[row, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
        for row, (c, n) in enumerate(zip(computed, new, strict=True))
        for p in range(c, c + n)
    ]
    return AttentionMetadata(
        num_decodes=sum(n == 1 for n in new),
        num_tokens=int(starts[-1]),
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(seq_lens),
        block_tables=tables,
        slot_mapping=torch.tensor(slots),
    )


def paged_logits(decoder: Decoder, prompts: Sequence[torch.Tensor], chunks: Sequence[int]) -> list[torch.Tensor]:
    """Logits of every position of each prompt, computed through a paged cache in chunks (the sizes in `chunks`, in turn,
    shifted by a place for each prompt), all prompts in one batch. The cache starts as NaN: a slot read before it is written
    shows."""
    config = decoder.config
    per_prompt = -(-max(map(len, prompts)) // BLOCK_SIZE)
    blocks = torch.randperm(per_prompt * len(prompts), generator=torch.Generator().manual_seed(0)).to(torch.int32) + 1
    tables = blocks.view(len(prompts), per_prompt)
    shape = (2, len(blocks) + 1, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    kv_caches = [torch.full(shape, float("nan"), dtype=decoder.embed_tokens.dtype) for _ in range(config.num_layers)]
    computed = [0] * len(prompts)
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    step = 0
    while any(c < len(p) for c, p in zip(computed, prompts, strict=True)):
        new = [min(chunks[(step + i) % len(chunks)], len(p) - computed[i]) for i, p in enumerate(prompts)]
        batch = sorted((i for i in range(len(prompts)) if new[i]), key=lambda i: new[i] != 1)  # decodes first
        meta = make_metadata([computed[i] for i in batch], [new[i] for i in batch], tables[batch])
        positions = torch.cat([torch.arange(computed[i], computed[i] + new[i]) for i in batch])
        token_ids = torch.cat([prompts[i][computed[i] : computed[i] + new[i]] for i in batch])
        with torch.inference_mode():
            hidden = decoder(token_ids, positions, kv_caches, meta)
            logits = decoder.logits(hidden)
        for i, piece in zip(batch, logits.split([new[i] for i in batch]), strict=True):
            rows[i].append(piece)
            computed[i] += new[i]
        step += 1
    return [torch.cat(pieces) for pieces in rows]


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference, in units of the largest reference value."""
    return float((ours.float() - reference.float()).abs().max() / reference.float().abs().max())
