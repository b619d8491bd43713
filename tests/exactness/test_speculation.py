"""The real model in float32, with drafts: each token must be (nearly) transformers' argmax, and sampled ones those without
drafts, but for a draw that float32's rounding decides.

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
from minivllm.sampling.sampler import uniform
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


MARGIN = 5e-5  # of probability: what 1e-4 in a logit, float32's own between two batch shapes, moves at most


def draw_margin(reference: Any, prompt: list[int], output: list[int], params: SamplingParams) -> float:
    """How far, in probability, the random number of the next token is from choosing a neighbour, or the nucleus from having one
    token more or less."""
    ids = prompt + output
    with torch.no_grad():
        logits = reference(torch.tensor([ids])).logits[0, -1].double()
    if len(output) < params.min_tokens:
        logits[reference.generation_config.eos_token_id] = float("-inf")
    seen = torch.tensor(sorted(set(ids)))
    penalty = params.repetition_penalty
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    p = (logits / params.temperature).softmax(-1)
    ordered, order = p.sort(descending=True)
    mass_before = ordered.cumsum(0) - ordered
    p[order[mass_before >= params.top_p]] = 0
    edges = (p / p.sum()).cumsum(0)
    number = uniform(torch.tensor([params.seed]), torch.tensor([len(ids)]))
    return min(float((edges - number).abs().min()), float((mass_before - params.top_p).abs().min()))


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
    for i, (params, mine, wanted) in enumerate(zip(sampled(), drafted, plain, strict=True)):
        if mine != wanted:  # batches of other shapes round otherwise: only a draw on the very edge of a token may tip over
            same = next((n for n, (a, b) in enumerate(zip(mine, wanted, strict=False)) if a != b), min(len(mine), len(wanted)))
            assert draw_margin(reference, outputs[i].prompt_token_ids, wanted[:same], params) < MARGIN
