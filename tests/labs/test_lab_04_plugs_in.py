"""The engine made of Lab 04's solution, and of nothing else where Lab 04 builds a part: it answers what minivllm answers.

The control plane is compared on the echo model, bit for bit; the tensors in float32, token for token. minivllm's own versions
of the five parts are made to fail first, so that none of them can have done the work.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

import minivllm.attention.reference
import minivllm.worker.input_batch
from minivllm import LLM, SamplingParams
from minivllm.components import Components
from minivllm.core.block_pool import BlockPool
from minivllm.core.engine_core import EngineCore
from minivllm.core.kv_cache_manager import KVCacheManager
from tests.core.harness import make_engine, make_request, oracle
from tests.labs import harness
from tests.labs.harness import gone, own_part

CONTROL = {"4.1": "block_pool", "4.2": "kv_cache_manager"}
TENSORS = {"4.3": "slot_mapping", "4.4": "write_kv", "4.5": "attention.decode"}
EXERCISES = {**CONTROL, **TENSORS}
PROMPTS = [[5, 9, 2], [7] * 18, list(range(40, 80)), [3]]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture
def solved(student: Path) -> Components:
    """The parts of a student who wrote what the solution says."""
    return harness.solved(*EXERCISES)


@pytest.fixture
def without_minivllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gone(monkeypatch, BlockPool, "allocate", "free")
    gone(monkeypatch, KVCacheManager, "allocate_slots")
    gone(monkeypatch, minivllm.worker.input_batch, "slot_mapping")
    gone(monkeypatch, minivllm.attention.reference, "write_kv", "paged_decode")
    backend = dataclasses.replace(minivllm.attention.reference.REFERENCE, write_kv=own_part, decode=own_part)
    monkeypatch.setattr(minivllm.attention.reference, "REFERENCE", backend)


def test_the_labs_five_parts_are_components_and_only_they(solved: Components) -> None:
    assert sorted(solved) == sorted(EXERCISES.values())  # not attention.prefill, though its file holds one
    for seam, part in solved.items():
        assert ".my_engine." in part.__module__, seam


def test_prefix_caching_is_off_and_one_line_says_so(solved: Components, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="minivllm"):
        engine = make_engine(components=dict(solved))
    assert engine.config.enable_prefix_caching is False
    lines = [record.message for record in caplog.records if "caching is off" in record.message]
    assert len(lines) == 1 and "my_engine.core.block_pool.BlockPool" in lines[0]


def test_prefix_caching_asked_for_by_name_is_refused(solved: Components) -> None:
    with pytest.raises(ValueError, match="needs 'caching', which your block_pool component"):
        make_engine(components=dict(solved), enable_prefix_caching=True)


def answers_of(engine: EngineCore, seed: int) -> int:
    """Random requests, some aborted on the way; each that ends must say what the echo model says. Returns how many ended."""
    rng = random.Random(seed)
    requests = [make_request(f"r{i}", rng.randint(1, 25), max_tokens=rng.randint(1, 12)) for i in range(12)]
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    aborted = {request.request_id for request in rng.sample(requests, 2)}
    waiting = list(requests)
    for step in range(400):
        if waiting and step % 2 == 0:
            engine.add_request(waiting.pop(0))
        if step == 9:
            engine.abort_requests(aborted & set(engine.scheduler.requests))
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] += output.new_token_ids
    assert not engine.has_unfinished_requests()
    manager = engine.scheduler.kv_cache_manager
    assert manager.block_pool.num_free_blocks == engine.executor.num_blocks - 1 and manager.usage == 0
    ended = [request for request in requests if request.request_id not in aborted]
    for request in ended:
        assert tokens[request.request_id] == oracle(engine, request)[0], request.request_id
    return len(ended)


@pytest.mark.usefixtures("without_minivllms_own")
@pytest.mark.parametrize("num_blocks", [200, 24, 11], ids=["plenty", "wraps around", "preempts"])
@pytest.mark.parametrize("seed", range(4))
def test_the_control_plane_answers_as_the_echo_model_does(solved: Components, num_blocks: int, seed: int) -> None:
    parts = {seam: solved[seam] for seam in CONTROL.values()}
    assert answers_of(make_engine(num_blocks, components=parts), seed) == 10


@pytest.mark.parametrize("seam", CONTROL.values())
def test_either_part_of_the_control_plane_works_with_minivllms_other(solved: Components, seam: str) -> None:
    answers_of(make_engine(14, components={seam: solved[seam]}), seed=0)


def generate(model: str | Path, parts: Components, prompts: list[Any], **settings: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(model, components=parts, dtype="float32", attention_backend="reference", **settings) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize("settings", [{"block_size": 4}, {"block_size": 4, "num_gpu_blocks_override": 16}, {}], ids=str)
def test_the_tensors_give_the_same_tokens(
    tiny: Path, solved: Components, settings: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Also where requests are preempted (15 blocks of 4 for 62 prompt tokens)."""
    settings = {"load_format": "dummy", "max_model_len": 60, **settings}
    expected = generate(tiny, Components(), PROMPTS, enable_prefix_caching=False, **settings)
    request.getfixturevalue("without_minivllms_own")
    assert generate(tiny, solved, PROMPTS, **settings) == expected


@pytest.mark.usefixtures("without_minivllms_own")
@pytest.mark.parametrize("missing", EXERCISES.values())
def test_without_one_of_the_parts_it_would_not_work(tiny: Path, solved: Components, missing: str) -> None:
    """The guard guards: each part of minivllm's would be called if the student's were not."""
    parts = Components({seam: part for seam, part in solved.items() if seam != missing})
    with pytest.raises((AssertionError, KeyError)):  # a pool that cannot even free ends in the engine's clean-up
        generate(tiny, parts, PROMPTS[:1], load_format="dummy", max_model_len=60, block_size=4)


def test_text_is_served_with_the_students_parts(smollm2: Path, solved: Components) -> None:
    prompts = ["The capital of France is", "Once upon a time", "Water boils at a temperature of"]
    settings = {"max_model_len": 64, "num_gpu_blocks_override": 33}
    assert generate(smollm2, solved, prompts, **settings) == generate(smollm2, Components(), prompts, **settings)
