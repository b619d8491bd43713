"""`minivllm bench compare`: engines in processes of their own, in turns. The figures are not tested."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from minivllm.bench.compare import OURS, EngineProcess, main, measure, plot, render, report, workload

ENGINE = """#!{python}
import json, sys
sys.stdin.readline()
print(json.dumps({{"version": "1.0", "dtype": "bfloat16", "start_seconds": 0.1}}), flush=True)
for line in sys.stdin:
    work = json.loads(line)
    if not work["prompts"]:
        sys.exit(3)
    rows = [[7] * n for n in work["output_lens"]]
    result = {{"seconds": 2.0, "output_tokens": sum(map(len, rows)), "token_ids": rows, "peak_rss_bytes": 5}}
    print(json.dumps(result), flush=True)
"""


@pytest.fixture
def interpreter(tmp_path: Path) -> str:
    """In place of a peer's Python: it answers without computing."""
    path = tmp_path / "python"
    path.write_text(ENGINE.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def result(interpreter: str) -> dict[str, Any]:
    engines = {name: EngineProcess(name, {}, interpreter) for name in (OURS, "llama.cpp")}
    works = {size: workload(size, 50_000, seed=0) for size in (1, 9)}
    runs = measure(engines, works, rounds=2)
    for engine in engines.values():
        engine.close()
    device = {"cpu": "a cpu", "cores": 2, "torch": "2"}
    return {"model": "m", "device": device, "workloads": report(engines, runs)}


def test_fewer_than_eight_at_once_are_eight_requests_all_the_same() -> None:
    assert [len(workload(size, 50_000, 0)["prompts"]) for size in (1, 8, 9)] == [8, 8, 9]
    assert workload(1, 50_000, 0)["prompts"] == workload(8, 50_000, 0)["prompts"]
    assert workload(1, 50_000, 0)["at_once"] == 1


def test_every_engine_runs_every_round_of_the_workloads_it_can(result: dict[str, Any]) -> None:
    first, second = result["workloads"]
    assert [len(engine["runs"]) for engine in first["engines"].values()] == [2, 2]
    assert list(second["engines"]) == [OURS]  # llama.cpp runs one sequence at a time
    assert first["ratios"]["llama.cpp"]["median"] == 1.0
    num_tokens = sum(workload(1, 50_000, 0)["output_lens"])
    assert first["engines"][OURS]["tokens_per_second"]["median"] == num_tokens / 2.0


def test_a_ratio_is_taken_within_each_round() -> None:
    class Engine:
        about: ClassVar[dict[str, str]] = {"version": "1", "dtype": "float32"}

    def runs(*rates: float) -> list[dict[str, float]]:
        return [{"tokens_per_second": rate, "peak_rss_bytes": 1} for rate in rates]

    engines: Any = {name: Engine() for name in (OURS, "vllm")}
    [part] = report(engines, {8: {OURS: runs(100, 200, 300), "vllm": runs(50, 200, 100)}})  # the machine became faster
    assert part["engines"][OURS]["tokens_per_second"]["median"] / part["engines"]["vllm"]["tokens_per_second"]["median"] == 2
    assert part["ratios"]["vllm"] == {"median": 2, "min": 1, "max": 3, "spread": 1}


def test_the_table_and_the_plot_are_made_of_the_result(result: dict[str, Any], tmp_path: Path) -> None:
    assert "llama.cpp 1.0" in render(result) and "minivllm is 1.00x" in render(result)
    pytest.importorskip("matplotlib")
    plot(result, tmp_path / "compare.png")
    assert (tmp_path / "compare.png").stat().st_size > 1000


def test_an_engine_that_ends_is_named_with_its_command(interpreter: str) -> None:
    engine = EngineProcess("vllm", {}, interpreter)
    with pytest.raises(ValueError, match=r"vllm ended with exit code 3.*peers\.py vllm"):
        engine.ask({"prompts": []})
    engine.close()


def test_an_engine_that_says_something_else_is_named_with_what_it_said(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\nprint('Welcome to my shell')\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(ValueError, match=r"vllm said 'Welcome to my shell' where its answer was due"):
        EngineProcess("vllm", {}, str(path))


def test_closing_an_engine_that_left_its_work_unread_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\nprint('{{}}', flush=True)\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    engine = EngineProcess("vllm", {}, str(path))
    engine._process.wait()
    assert engine._process.stdin is not None
    engine._process.stdin.write("work")  # waits in the buffer of a pipe that nobody reads
    engine.close()


def test_an_interpreter_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"vllm does not start: .*no/python"):
        EngineProcess("vllm", {}, "/no/python")


@pytest.mark.parametrize(
    "flags",
    [["--peers", "tea"], ["--peer-python", "tea=x"], ["--peers", "llama.cpp"], ["--rounds", "0"], ["--num-prompts", "0"]],
)
def test_wrong_flags_end_it_before_an_engine_is_started(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(flags)
    assert "usage: minivllm bench compare" in capsys.readouterr().err


@pytest.mark.parametrize("has_gpu", [True, False])
def test_engines_that_would_take_a_whole_gpu_share_it(monkeypatch: pytest.MonkeyPatch, has_gpu: bool) -> None:
    from minivllm.bench import peers

    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    assert peers._share_of_gpu({"share_of_gpu": 0.3}) == ({"gpu_memory_utilization": 0.3} if has_gpu else {})
