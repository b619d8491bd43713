"""The engine with Lab 09's runner: it serves from graphs, says what it says without them, and its padding harms nobody.

minivllm's own versions of the methods are made to fail first, so that none of them can have done the work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checks.authoring.source import answer_source
from checks.exercises import find
from checks.student.engine import components, save_answer
from minivllm.components import Components
from minivllm.worker.graphs import GraphRunner
from minivllm.worker.model_runner import ModelRunner
from tests.labs import harness
from tests.labs.harness import gone
from tests.worker.test_graphs import checksum, decodes
from tests.worker.test_model_runner import LLAMA, MISTRAL, complete, make_runner, prompts

METHODS = ("pick_bucket", "fill", "capture", "replay")


@pytest.fixture
def solved(student: Path) -> Components:
    return harness.solved("9.2", "9.3")


@pytest.fixture
def without_minivllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gone(monkeypatch, GraphRunner, *METHODS)


def started(folder: Path, parts: Components, model: dict[str, Any] = LLAMA, **settings: Any) -> ModelRunner:
    runner = make_runner(folder, model, dict(parts), **settings)
    runner.warm_up()
    assert runner.graphs is not None and set(runner.graphs.graphs) == set(runner.graphs.buckets)
    return runner


def test_the_labs_part_is_the_graph_runner(solved: Components) -> None:
    assert list(solved) == ["graph_runner"]
    assert ".my_engine." in solved["graph_runner"].__module__


@pytest.mark.usefixtures("without_minivllms_own")
@pytest.mark.parametrize("model", [LLAMA, MISTRAL], ids=["full attention", "sliding window"])
def test_requests_get_the_tokens_they_get_without_graphs(tmp_path: Path, solved: Components, model: dict[str, Any]) -> None:
    token_ids = prompts(5, 9, 1, 17, 3)
    expected, _ = complete(make_runner(tmp_path, model), token_ids)
    runner = started(tmp_path, solved, model)
    replays: list[int] = []
    assert runner.graphs is not None
    replay = runner.graphs.replay
    runner.graphs.replay = lambda bucket: replays.append(bucket) or replay(bucket)
    assert complete(runner, token_ids)[0] == expected
    assert 8 in replays


@pytest.mark.usefixtures("without_minivllms_own")
def test_and_under_preemption(tmp_path: Path, solved: Components) -> None:
    token_ids = prompts(9, 8, 7)
    settings = {"num_gpu_blocks_override": 8, "max_model_len": 24}
    expected, recorder = complete(make_runner(tmp_path, **settings), token_ids)
    assert recorder.preempted
    assert complete(started(tmp_path, solved, **settings), token_ids)[0] == expected


@pytest.mark.usefixtures("without_minivllms_own")
@pytest.mark.parametrize("num_rows", [1, 3, 5])
def test_a_padded_step_leaves_every_real_slot_untouched(tmp_path: Path, solved: Components, num_rows: int) -> None:
    runner = started(tmp_path, solved)
    for cache in runner.kv_caches:
        torch.nn.init.normal_(cache[:, 1:])
    inputs = decodes([5, 2, 8, 4, 1][:num_rows])
    own = inputs.slot_mapping.tolist()
    before = checksum(runner, without_slots=own)
    with torch.inference_mode():
        assert runner.graphs is not None and runner.graphs.run(inputs) is not None
    assert torch.equal(checksum(runner, without_slots=own), before)


def test_beside_lab_04s_attention_steps_run_without_graphs(
    tmp_path: Path, student: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A student's attention may loop over rows in Python, and a recording would keep the lengths it saw."""
    for exercise in ("4.4", "4.5", "9.2", "9.3"):
        save_answer(find(exercise), answer_source(find(exercise)))
    with caplog.at_level("INFO", logger="minivllm"):
        runner = make_runner(tmp_path, components=dict(components()))
    assert runner.graphs is None and "graphs is off: the write_kv component" in caplog.text
    runner.warm_up()
    token_ids = prompts(5, 9, 1)
    assert complete(runner, token_ids)[0] == complete(make_runner(tmp_path), token_ids)[0]
