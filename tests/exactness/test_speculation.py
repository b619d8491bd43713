"""The real model in float32, with drafts: each token must be (nearly) transformers' argmax, and sampled ones those without
drafts.

A few prompts in every run; 200 with HYPOTHESIS_PROFILE=fuzz.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from minivllm import LLM, SamplingParams
from minivllm.spec_decode.eagle import SHIPPED
from minivllm.spec_decode.prompts import held_out_prompts
from tests.exactness.test_against_transformers import TOLERANCE, worst_gap

NUM_PROMPTS = 200 if os.environ.get("HYPOTHESIS_PROFILE") == "fuzz" else 8
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "draft_model": {"method": "draft_model", "model": "{draft}", "num_speculative_tokens": 3},
    "eagle": {"method": "eagle", "num_speculative_tokens": 3},
}
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "num_gpu_blocks_override": 120,
    "max_num_batched_tokens": 96,
    "max_num_seqs": 12,
}


def chats(count: int) -> list[list[dict[str, str]]]:
    """Half of them quote themselves, which drafts like."""
    rng = random.Random(1)
    texts = held_out_prompts(count)
    return [
        [{"role": "user", "content": f"Repeat this list twice: {rng.sample(range(30), 6)}" if i % 2 else text}]
        for i, text in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def small_model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's first three layers: a smaller model with the same vocabulary, and often wrong."""
    folder = tmp_path_factory.mktemp("small")
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    model.model.layers = model.model.layers[:3]
    model.config.num_hidden_layers = 3
    model.config.layer_types = None
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(smollm2: Path) -> list[list[int]]:
    """Sampled without drafts."""
    with LLM(str(smollm2), **SETTINGS) as llm:
        return [output.outputs[0].token_ids for output in llm.chat(chats(NUM_PROMPTS), sampled(), use_tqdm=False)]


def sampled() -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.1, seed=i, max_tokens=16, min_tokens=4)
        for i in range(NUM_PROMPTS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_answers_with_drafts_are_the_models_own(smollm2: Path, small_model: Path, plain: list[list[int]], method: str) -> None:
    if method == "eagle" and not (SHIPPED / "model.safetensors").is_file():
        pytest.skip("the EAGLE head is not in this checkout")
    settings = {k: v.format(draft=small_model) if isinstance(v, str) else v for k, v in METHODS[method].items()}
    reference = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(str(smollm2), speculative_config=settings, **SETTINGS) as llm:
        outputs = llm.chat(chats(NUM_PROMPTS), greedy, use_tqdm=False)
        stats = llm.spec_decode_stats
        assert stats is not None
        assert sum(stats.accepted) > 0
        drafted = [output.outputs[0].token_ids for output in llm.chat(chats(NUM_PROMPTS), sampled(), use_tqdm=False)]
    for output in outputs:
        assert len(output.outputs[0].token_ids) == 24
        assert worst_gap(reference, output.prompt_token_ids, output.outputs[0].token_ids) < TOLERANCE
    assert drafted == plain
