"""gpu-report where there is no GPU: it refuses by name; and its parts over a tiny model on the CPU, for their arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minivllm import LLM
from minivllm.bench import gpu_report
from minivllm.cli import main
from minivllm.worker.graphs import GraphRunner
from tests.worker.test_model_runner import LLAMA

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and it would be measured")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """An engine with graphs, recorded operator by operator."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 10000, "max_position_embeddings": 4096}))
    return LLM(
        folder,
        components={"graph_runner": GraphRunner},
        load_format="dummy",
        dtype="float32",
        attention_backend="reference",
        max_num_seqs=4,
        num_gpu_blocks_override=200,
        enable_prefix_caching=False,
    )


@without_gpu
def test_it_refuses_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "gpu-report", "--json", str(tmp_path / "report.json")]) == 1
    assert "gpu-report needs an NVIDIA GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_steps_are_measured_with_graphs_and_without(llm: LLM) -> None:
    runner = llm.llm_engine.executor
    part = gpu_report.measure_steps(runner, (1, 3, 9), length=20, seconds=0.0)
    assert [(row["batch"], row["length"]) for row in part["rows"]] == [(1, 20), (4, 20)]
    assert all(row["eager_ms"] > 0 and row["graphed_ms"] > 0 for row in part["rows"])
    assert runner.graphs.buffers.seq_lens.tolist() == [1] * 4  # padding again
    assert "in float32, graphed, attention" in runner.describe()


def test_sequences_are_shorter_where_the_pool_is_small(llm: LLM) -> None:
    runner = llm.llm_engine.executor
    buffers = runner.graphs.buffers
    assert gpu_report.fill(buffers, runner, 100_000) == 49 * 16  # 199 blocks for four
    assert buffers.block_tables[:, :49].unique().tolist() == list(range(1, 197))
    assert buffers.slot_mapping.tolist() == [49 * 16 * (1 + i) + 15 for i in range(4)]
    buffers.clear()


def test_throughput_takes_what_the_time_allows(llm: LLM) -> None:
    part = gpu_report.measure_throughput(llm, seconds_left=0.0, slowest_step=1.0)
    assert (part["requests"], part["of"]) == (1, 256)
    assert part["output_tokens"] == gpu_report.nano_vllm_workload()[0].output_len
    assert part["output_tok_s"] == pytest.approx(part["output_tokens"] / part["generate_seconds"])


def test_the_workload_is_nano_vllms() -> None:
    work = gpu_report.nano_vllm_workload()
    lengths = [len(request.prompt_token_ids) for request in work] + [request.output_len for request in work]
    assert len(work) == 256 and min(lengths) >= 100 and max(lengths) <= 1024
    assert work == gpu_report.nano_vllm_workload()


def test_failed_tests_are_named() -> None:
    xml = """<testsuites><testsuite>
      <testcase classname="tests.gpu.test_kernels" name="test_a"/>
      <testcase classname="tests.gpu.test_kernels" name="test_b"><failure message="off by one">trace</failure></testcase>
      <testcase classname="tests.gpu.test_engine" name="test_c"><skipped message="no bf16"/></testcase>
    </testsuite></testsuites>"""
    results = gpu_report.read_results(xml)
    assert (results["passed"], results["failed"], results["skipped"]) == (1, 1, 1)
    assert results["failures"] == {"tests.gpu.test_kernels::test_b": "off by one"}
    assert "test_b" in results["error"]


def test_all_skipped_is_not_a_success() -> None:
    xml = '<testsuite><testcase classname="a" name="b"><skipped message="no GPU"/></testcase></testsuite>'
    assert "nothing was tested" in gpu_report.read_results(xml)["error"]


def test_what_has_been_measured_is_saved_before_the_next_part_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_report, "measure_limits", lambda: {"bandwidth_gb_s": 3000.0})
    monkeypatch.setattr(gpu_report, "run_tests", lambda limit: {"passed": 7})
    monkeypatch.setattr(gpu_report, "in_own_process", lambda part, model, bandwidth, limit: {"given": [part, bandwidth]})
    monkeypatch.setattr(gpu_report, "measure_engine", die)
    saved: list[dict[str, Any]] = []
    with pytest.raises(KeyboardInterrupt):
        gpu_report.make_report("m", lambda report: saved.append(json.loads(json.dumps(report))))
    assert [list(report["parts"]) for report in saved] == [["device"], ["device", "tests"], ["device", "tests", "kernels"]]
    assert saved[-1]["parts"]["kernels"]["given"] == ["kernels", 3000.0] and saved[-1]["seconds"] > 0


def test_tests_that_take_too_long_are_counted_as_far_as_they_came() -> None:
    part = gpu_report.read_unfinished(b"a::one PASSED [ 1%]\na::two FAILED [ 2%]\na::passed_it PASSED [ 3%]\na::four ", 130.0)
    assert part["error"] == "tests/gpu took more than 130 s; until then 2 passed, 1 failed, 0 skipped"


def test_a_part_in_a_process_of_its_own_is_read_back_or_its_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: object) -> SimpleNamespace:
        assert command[1:5] == ["-m", "minivllm.bench.gpu_report", "--part", "kernels"]
        if ends_well:
            Path(command[command.index("--json") + 1]).write_text('{"line": "fine"}')
        return SimpleNamespace(returncode=-6, stdout="", stderr="CUDA error: an illegal memory access")

    monkeypatch.setattr(gpu_report.subprocess, "run", run)
    ends_well = True
    assert gpu_report.in_own_process("kernels", "m", 3000.0, 9) == {"line": "fine"}
    ends_well = False
    assert gpu_report.in_own_process("kernels", "m", None, 9)["error"] == (
        "kernels ended with -6: CUDA error: an illegal memory access"
    )


def test_a_part_that_fails_is_written_down_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    result = gpu_report._part("kernels", lambda: 1 / 0)
    assert result["error"] == "ZeroDivisionError: division by zero"
    assert "division by zero" in capsys.readouterr().out
