"""Engines that speculate, over tiny random models in float32, and a drafter that is right as often as a test wants."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minivllm.components import Components
from minivllm.config import EngineConfig
from minivllm.core.engine_core import EngineCore
from minivllm.core.step import EngineCoreRequest, FinishReason, TokenLogprobs
from minivllm.sampling_params import SamplingParams
from minivllm.worker.model_runner import ModelRunner

VOCAB = 101
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
}
DEFAULTS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "device": "cpu",
    "attention_backend": "reference",
    "block_size": 4,
    "num_gpu_blocks_override": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
# What a step may look like: the budget decides the chunks, the pool who is preempted.
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 4},
    "no prefix caching": {"enable_prefix_caching": False, "block_size": 3},
    "radix": {"prefix_cache": "radix"},
    "preemption": {"num_gpu_blocks_override": 18},
    "preemption and chunks": {"num_gpu_blocks_override": 18, "max_num_batched_tokens": 12, "max_num_seqs": 4},
    "cpu kernels": {"attention_backend": "cpu"},
    "the end of max_model_len": {"max_model_len": 27},
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class Answer:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and self.plain() == other.plain()

    def __repr__(self) -> str:
        return str(self.plain())

    def plain(self) -> tuple[Any, ...]:
        return self.token_ids, [t.token_ids for t in self.logprobs], self.finish_reason, self.stop_reason


def save_model(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return folder


def make_runner(model: Path, components: dict[str, Any] | None = None, **settings: Any) -> ModelRunner:
    config = EngineConfig.from_kwargs(**{**DEFAULTS, "model": str(model), **settings})
    return ModelRunner(config, Components(components))


def run(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    components: dict[str, Any] | None = None,
    eos_token_ids: tuple[int, ...] = (),
    stagger: int = 0,
) -> list[Answer]:
    """All prompts through the engine, each `stagger` steps after the one before."""
    config = runner.config.fit_max_model_len(runner.config.max_model_len or runner.max_model_len, runner.num_blocks)
    core = EngineCore(config, runner, Components(components), vocab_size=runner.vocab_size)
    each = params if isinstance(params, Sequence) else [params] * len(prompts)
    waiting = [
        EngineCoreRequest(
            f"r{i}",
            list(prompt),
            p,
            seed=p.seed or 0,
            eos_token_ids=eos_token_ids,
            skip_reading_prefix_cache=p.prompt_logprobs is not None,
        )
        for i, (prompt, p) in enumerate(zip(prompts, each, strict=True))
    ]
    answers = {request.request_id: Answer() for request in waiting}
    steps = 0
    while waiting or core.has_unfinished_requests():
        while waiting and steps >= stagger * (len(prompts) - len(waiting)):
            core.add_request(waiting.pop(0))
        for out in core.step():
            assert out.error is None, out.error
            answer = answers[out.request_id]
            answer.token_ids += out.new_token_ids
            answer.logprobs += out.new_logprobs or []
            answer.finish_reason, answer.stop_reason = out.finish_reason, out.stop_reason
        steps += 1
        assert steps < 2000, "the engine spins"
    assert core.kv_cache_manager.block_pool.num_free_blocks == runner.num_blocks - 1
    return list(answers.values())


def prompts(*lengths: int, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def many_prompts() -> list[list[int]]:
    """Around every block edge; the last two share three blocks, and one is there twice."""
    found = prompts(1, 4, 5, 8, 13, 21)
    return [*found, [*found[-1][:12], 7], found[-1]]


def knowing_drafter(sequences: Sequence[Sequence[int]], accuracy: float) -> type:
    """A drafter class that knows how each sequence goes on, and says it right with this probability."""
    known = [np.array(sequence) for sequence in sequences]
    noise = random.Random(0)

    class KnowingDrafter:
        capabilities = frozenset({"ngram"})

        def __init__(self, prompt_lookup_max: int, prompt_lookup_min: int) -> None:
            pass

        def propose(self, token_ids: np.ndarray, k: int) -> list[int]:
            n = len(token_ids)
            for sequence in known:
                if len(sequence) >= n and (sequence[:n] == token_ids).all():
                    right = [int(t) for t in sequence[n : n + k]]
                    return [t if noise.random() < accuracy else (t + noise.randrange(1, VOCAB)) % VOCAB for t in right]
            return [noise.randrange(VOCAB) for _ in range(k)]

    return KnowingDrafter
