"""`minivllm bench latency`: the parts of a step are all there and add up; nothing is left behind in the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from minivllm import LLM, EngineConfig
from minivllm.bench.latency import PARTS, decode_step, render
from minivllm.bench.perplexity import own_text
from minivllm.worker.model_runner import ModelRunner
from tests.models.conftest import tiny_model


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    tiny_model("llama").save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), dtype="float32", num_gpu_blocks_override=50, trace=True)
    runner = ModelRunner(config)
    return LLM.from_executor(runner, config, vocab_size=runner.vocab_size, model_max_len=runner.max_model_len)


@pytest.mark.parametrize("budget_chunks_the_prompt", [False, True])
def test_the_parts_of_a_decode_step_add_up_to_it(llm: LLM, budget_chunks_the_prompt: bool) -> None:
    model, sampler = llm.llm_engine.executor.model, llm.llm_engine.executor.sampler
    parts = decode_step(llm, 3, 150 if budget_chunks_the_prompt else 5, 8)
    assert list(parts) == [*PARTS, "step"]
    assert parts["lm_head"] > 0
    assert parts["attention"] > 0
    assert (llm.llm_engine.executor.model, llm.llm_engine.executor.sampler) == (model, sampler)


def test_the_table_has_a_column_for_each_batch_size() -> None:
    parts = dict.fromkeys([*PARTS, "step"], 2.0)
    lines = render({1: parts, 8: parts}).splitlines()
    assert lines[0] == "| ms | n=1 | n=8 |"
    assert lines[-1] == "| output tok/s | 500 | 4000 |"
    assert len(lines) == len(PARTS) + 4


def test_the_text_for_perplexity_is_always_at_hand() -> None:
    assert len(own_text().split()) > 4000
