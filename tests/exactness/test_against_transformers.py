"""Real models in float32: transformers is run over prompt + our output, and each token we chose must be (nearly) its argmax.

Teacher forcing, not comparison of texts: two right engines may part ways where two logits are equal to the last bits, and a
text comparison would then say nothing about the rest.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from minivllm import LLM, EngineConfig, SamplingParams
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.worker.model_runner import ModelRunner
from tests.models.conftest import FAMILIES, tiny_model

TOLERANCE = 1e-3
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# What a step looks like: the budget decides the chunks, the pool who is preempted.
SHAPES: dict[str, dict[str, Any]] = {
    "budget 16": {"max_num_batched_tokens": 16},
    "budget 64": {"max_num_batched_tokens": 64},
    "budget 2048": {"max_num_batched_tokens": 2048},
    "budget 64, no prefix caching": {"max_num_batched_tokens": 64, "enable_prefix_caching": False},
    "budget 2048, no prefix caching": {"max_num_batched_tokens": 2048, "enable_prefix_caching": False},
    "a pool that preempts": {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 12},
    "blocks of 4": {"max_num_batched_tokens": 64, "block_size": 4},
}


def prompts_of_many_lengths(vocab_size: int, longest: int) -> list[list[int]]:
    """20 prompts: 1 token, around every block edge, and long ones; some share a prefix of two blocks, one is sent twice."""
    rng = random.Random(0)
    lengths = [1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 40, 47, 48, 49, 64, 70, 90]
    prompts = [[rng.randrange(vocab_size) for _ in range(min(n, longest))] for n in lengths]
    shared = prompts[9][:32]
    return [*prompts, [*shared, *prompts[4]][:longest], list(prompts[9])]


def worst_gap(reference: transformers.PreTrainedModel, prompt: list[int], output: list[int]) -> float:
    """How far below the reference's best logit our tokens are, at worst."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    return float((logits.max(-1).values - chosen).max())


class Reference:
    """transformers' model; asked about the same sequence twice it remembers."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.model = model
        self.known: dict[tuple[int, ...], float] = {}

    def gap(self, prompt: list[int], output: list[int]) -> float:
        key = (len(prompt), *prompt, *output)
        if key not in self.known:
            self.known[key] = worst_gap(self.model, prompt, output)
        return self.known[key]


@pytest.fixture(scope="module")
def smollm2_reference(smollm2: Path) -> Reference:
    return Reference(transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("shape", SHAPES)
def test_smollm2_chooses_what_transformers_would(smollm2: Path, smollm2_reference: Reference, shape: str, backend: str) -> None:
    if backend == "reference" and shape not in ("budget 64", "a pool that preempts"):
        pytest.skip("one budget and one preemption are enough for the slow backend")
    settings = {"num_gpu_blocks_override": 400, **SHAPES[shape]}
    preempted: list[str] = []

    class CountingScheduler(Scheduler):
        def preempt(self, request: Request) -> None:
            preempted.append(request.request_id)
            super().preempt(request)

    parts = {"scheduler": CountingScheduler}
    with LLM(str(smollm2), dtype="float32", attention_backend=backend, components=parts, **settings) as llm:
        prompts = prompts_of_many_lengths(llm.model_config.vocab_size, longest=90)
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        cached = [o.num_cached_tokens for o in outputs]
    assert bool(preempted) == ("preempts" in shape)
    assert (max(cached) > 0) == (settings.get("enable_prefix_caching", True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == 12
        assert smollm2_reference.gap(prompt, output.outputs[0].token_ids) < TOLERANCE


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """Folder of a tiny random model of a family, and transformers' own."""
    model = tiny_model(request.param)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder, Reference(model)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_family_chooses_what_transformers_would(family: tuple[Path, Reference], shape: str) -> None:
    folder, reference = family
    settings = {"num_gpu_blocks_override": 400, **SHAPES[shape]}
    runner = ModelRunner(EngineConfig(model=str(folder), dtype="float32", **settings))
    llm = LLM.from_executor(runner, runner.config, vocab_size=runner.vocab_size, model_max_len=runner.max_model_len)
    prompts = prompts_of_many_lengths(runner.vocab_size, longest=90)
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
        assert reference.gap(prompt, output.outputs[0].token_ids) < TOLERANCE
