"""The schedulers of Labs 05 and 06, as a student has them who wrote what the solutions say, in the real engine: the same tokens
as minivllm's, each within what it can do; and what it cannot do is off, or refused by name.

minivllm's own versions of what the labs build are made to fail first, so that none of them can have done the work.
"""

from __future__ import annotations

import ast
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checks.authoring.source import answer_source
from checks.exercises import find
from checks.sandbox.cell import body_without_docstring, find_function
from checks.student.assemble import Answer, assemble
from checks.student.engine import REFERENCE, save_answer
from checks.student.help import answer_text
from minivllm.bench import metrics
from minivllm.bench.replay import replay
from minivllm.bench.workloads import Workload, WorkloadRequest
from minivllm.components import Components
from minivllm.config import EngineConfig
from minivllm.core.engine_core import EngineCore
from minivllm.core.scheduler import Scheduler
from minivllm.core.step import EngineCoreRequest
from minivllm.observe.clock import VirtualClock
from minivllm.observe.recorder import RecordingEngineCore
from minivllm.sim.echo import EchoExecutor
from minivllm.worker.input_batch import build_metadata, slot_mapping
from tests.core.harness import make_engine, make_request, oracle
from tests.labs.harness import gone, solved

LAB_05, LAB_06 = ("5.2", "5.3", "5.4"), ("6.1", "6.2")
SCHEDULER_TEXT = (REFERENCE / "core" / "scheduler.py").read_text()


@pytest.fixture
def lab_05(student: Path) -> Components:
    return solved(*LAB_05)


@pytest.fixture
def lab_06(student: Path) -> Components:
    return solved(*LAB_05, *LAB_06)


@pytest.fixture
def without_minivllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gone(monkeypatch, Scheduler, "schedule", "num_new_tokens", "finish_reason", "pick_victim", "preempt")


def serve(engine: EngineCore, seed: int) -> dict[str, list[int]]:
    """Random requests that come over time, some with stop tokens and priorities, one of them aborted. What each answers that
    ended is what the echo model says."""
    rng = random.Random(seed)
    ranked = engine.config.scheduling_policy == "priority"
    requests: list[EngineCoreRequest] = []
    for i in range(14):
        more = {"stop_token_ids": list(range(40, 60))} if i % 3 == 0 else {}
        priority = rng.randint(0, 3) if ranked else 0
        requests.append(make_request(f"r{i}", rng.randint(1, 24), rng.randint(1, 12), priority=priority, **more))
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    waiting = list(requests)
    for step in range(600):
        if waiting and step % 2 == 0:
            engine.add_request(waiting.pop(0))
        if step == 9:
            engine.abort_requests(["r3"])
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] += output.new_token_ids
    assert not engine.has_unfinished_requests()
    assert engine.kv_cache_manager.block_pool.num_free_blocks == engine.executor.num_blocks - 1
    for request in requests:
        if request.request_id != "r3":
            assert tokens[request.request_id] == oracle(engine, request)[0], request.request_id
    return tokens


SETTINGS: list[dict[str, Any]] = [
    {"num_blocks": 200, "max_num_batched_tokens": 64},
    {"num_blocks": 200, "max_num_batched_tokens": 37, "max_num_seqs": 3},
    {"num_blocks": 24, "max_num_batched_tokens": 64},
    {"num_blocks": 11, "max_num_batched_tokens": 64},
    {"num_blocks": 13, "max_num_batched_tokens": 64, "scheduling_policy": "priority"},
]
CHUNKS: list[dict[str, Any]] = [
    {"num_blocks": 200, "max_num_batched_tokens": 8},
    {"num_blocks": 24, "max_num_batched_tokens": 8, "long_prefill_token_threshold": 3},
    {"num_blocks": 13, "max_num_batched_tokens": 9, "scheduling_policy": "priority"},
    {"num_blocks": 16, "max_num_batched_tokens": 64, "enable_chunked_prefill": False},
]


@pytest.mark.usefixtures("without_minivllms_own")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_scheduler_of_lab_05_serves_whole_prompts(lab_05: Components, settings: dict[str, Any]) -> None:
    for seed in range(3):
        serve(make_engine(components=dict(lab_05), **settings), seed)


@pytest.mark.usefixtures("without_minivllms_own")
@pytest.mark.parametrize("settings", SETTINGS + CHUNKS, ids=str)
def test_the_scheduler_of_lab_06_serves_chunks_too(lab_06: Components, settings: dict[str, Any]) -> None:
    for seed in range(3):
        serve(make_engine(components=dict(lab_06), **settings), seed)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_lab_05_lab_06_and_minivllm_say_the_same(student: Path, settings: dict[str, Any]) -> None:
    """Each as it chunks, or does not; only an aborted request may be cut elsewhere."""
    settings = {**settings, "max_model_len": 36}
    parts = [solved(*LAB_05), solved(*LAB_06), Components()]
    tokens = [serve(make_engine(components=dict(part), **settings), seed=7) for part in parts]
    assert all({**answers, "r3": None} == {**tokens[0], "r3": None} for answers in tokens)


@pytest.mark.parametrize("settings", CHUNKS, ids=str)
def test_lab_06_plans_the_very_steps_of_minivllm(lab_06: Components, settings: dict[str, Any]) -> None:
    plans = []
    for parts in (lab_06, Components()):
        engine = make_engine(components=dict(parts), **settings)
        plans.append(steps := [])
        schedule = engine.scheduler.schedule
        engine.scheduler.schedule = lambda plan=schedule, steps=steps: steps.append(plan()) or steps[-1]
        serve(engine, seed=2)
    assert plans[0] == plans[1]


def test_chunking_is_off_in_lab_05_and_one_line_says_so(lab_05: Components, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="minivllm"):
        engine = make_engine(components=dict(lab_05), max_num_batched_tokens=32)
    lines = [record.message for record in caplog.records if "is off" in record.message]
    assert len(lines) == 1 and "chunking is off" in lines[0] and "my_engine.core.scheduler.Scheduler" in lines[0]
    assert (engine.config.enable_chunked_prefill, engine.config.max_model_len) == (False, 32)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"enable_chunked_prefill": True}, "enable_chunked_prefill=True needs 'chunking', which your scheduler component"),
        ({"long_prefill_token_threshold": 8}, "long_prefill_token_threshold=8 needs 'chunking'"),
    ],
)
def test_what_lab_05_cannot_do_is_refused_by_name(lab_05: Components, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_engine(components=dict(lab_05), **settings)


def test_nothing_is_off_in_lab_06(lab_06: Components, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="minivllm"):
        engine = make_engine(components=dict(lab_06), enable_chunked_prefill=True, long_prefill_token_threshold=8)
    assert engine.config.enable_chunked_prefill is True
    assert [record.message for record in caplog.records if "is off" in record.message] == []


def test_lab_06_takes_the_place_of_lab_05s_schedule_and_leaves_the_rest_of_it() -> None:
    answers = [Answer(find(exercise), answer_source(find(exercise))) for exercise in (*LAB_05, *LAB_06)]
    text = assemble(SCHEDULER_TEXT, answers)
    assert "exercises 5.2, 5.4, 6.1, 6.2 in it" in text
    for exercise in ("5.2", "5.4", "6.1", "6.2"):
        assert f"# --- exercise {exercise}: yours" in text


def test_a_class_derived_from_the_files_own_needs_no_import_of_it() -> None:
    text = assemble(SCHEDULER_TEXT, [Answer(find("5.4"), answer_source(find("5.4")))])
    assert "import minivllm.core.scheduler" not in text
    uses_it = answer_source(find("5.4")).replace(
        "return self.running[-1]", "return minivllm.core.scheduler.Scheduler and self.running[-1]"
    )
    assert "import minivllm.core.scheduler" in assemble(SCHEDULER_TEXT, [Answer(find("5.4"), uses_it)])


def test_the_text_of_an_answer_is_the_students_once_it_has_passed(student: Path) -> None:
    assert answer_text("5.1") == answer_source(find("5.1"))
    save_answer(find("5.1"), "def wasted_slots(lengths, batch_size):\n    return 0\n")
    assert "return 0" in answer_text("5.1")


def test_the_metadata_of_lab_06_is_the_workers() -> None:
    """One function: the answer is taken from the engine, and the engine's batch is built with it."""
    space: dict[str, Any] = {}
    exec(answer_source(find("6.3")), space)
    rng = np.random.default_rng(0)
    computed, scheduled = rng.integers(0, 20, 6), rng.integers(1, 9, 6)
    tables = rng.permutation(6 * 8).reshape(6, 8) + 1
    own, theirs = (f(computed, scheduled, tables, 4, slot_mapping) for f in (space["build_metadata"], build_metadata))
    assert all(np.array_equal(a, b) for a, b in zip(own, theirs, strict=True))


def test_lab_06s_schedule_is_shorter_than_lab_05s() -> None:
    lengths = []
    for exercise in ("5.3", "6.2"):
        function = find_function(ast.parse(answer_source(find(exercise))), "Scheduler.schedule")
        assert function is not None
        lengths.append(sum(len(ast.unparse(statement).splitlines()) for statement in body_without_docstring(function)))
    assert lengths[1] < lengths[0]


def worst_pause(parts: Components, budget: int) -> float:
    """The longest time between two tokens of eight requests that decode while a prompt of 512 tokens comes in: on the echo
    model, by a made-up clock."""
    config = EngineConfig(max_num_batched_tokens=budget, max_num_seqs=16, max_model_len=640).resolved("cpu")
    engine = RecordingEngineCore(config, EchoExecutor(400, 16), Components(dict(parts)))
    asked = [WorkloadRequest(None, [i] * 16, 64, group="reader") for i in range(8)]
    asked.append(WorkloadRequest(None, [9] * 512, 4, arrival_s=0.2, group="long"))
    trace = replay(engine, Workload("a long prompt", 0, asked), clock=VirtualClock())
    return max(metrics.itl(metrics.select(trace, group="reader")))


def test_a_long_prompt_makes_those_who_decode_wait_a_third_as_long_in_lab_06(student: Path) -> None:
    whole = worst_pause(solved(*LAB_05), budget=640)  # before Lab 06's answers take the place of its schedule
    assert 3 * worst_pause(solved(*LAB_06), budget=64) <= whole
