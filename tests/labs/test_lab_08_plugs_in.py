"""Lab 08's kernels in the engine: where Triton runs they are the engine's decode attention, elsewhere Lab 04's answer stays.

What they compute is `interpreted_lab_08.py`'s, run in a process in which Triton interprets; on a GPU, tests/gpu's.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
import torch

from checks.authoring.source import SOLUTIONS, answer_source, read_source
from checks.exercises import find
from checks.exercises.lab_08 import CHECKS
from checks.sandbox.cell import find_function
from checks.student import engine, kernels
from checks.student.engine import components, in_use, save_answer, use
from checks.student.failure import CheckFailed
from minivllm import components as seams
from minivllm.attention import get_backend, replace_parts
from minivllm.components import Components
from minivllm.models.registry import KNOWN_CONFIGS
from tests.labs import harness

pytest.importorskip("triton", reason="Triton has packages for Linux only")
EXERCISES = ("4.4", "4.5", "8.3", "8.4")
HERE = Path(__file__).resolve().parent
MODEL = KNOWN_CONFIGS["meta-llama/Llama-3.1-8B-Instruct"]


@pytest.fixture
def solved(student: Path) -> Path:
    harness.solved(*EXERCISES)
    return student


@pytest.fixture
def triton_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (seams, engine):
        monkeypatch.setattr(module, "triton_runs_here", lambda: True)


def module_of_decode() -> str:
    return str(components()["attention.decode"].__module__)


def test_without_a_gpu_lab_04s_answer_stays(solved: Path) -> None:
    assert module_of_decode().endswith("my_engine.attention.reference")
    assert in_use()["attention.decode"] == ["4.5"]
    assert (solved / "my_engine" / "attention" / "triton_kernels.py").is_file()


@pytest.mark.usefixtures("triton_runs")
def test_where_triton_runs_the_kernels_are_the_engines(solved: Path) -> None:
    assert module_of_decode().endswith("my_engine.attention.triton_kernels")
    assert sorted(in_use()["attention.decode"]) == ["8.3", "8.4"]
    assert "graphs" in components()["attention.decode"].capabilities
    assert components()["write_kv"].__module__.endswith("my_engine.attention.reference")


@pytest.mark.usefixtures("triton_runs")
def test_kernels_alone_are_components_too(student: Path) -> None:
    save_answer(find("8.3"), answer_source(find("8.3")))
    assert sorted(components()) == ["attention.decode"]


@pytest.mark.usefixtures("triton_runs")
def test_use_brings_lab_04s_answer_back(solved: Path) -> None:
    use("attention.decode", "4.5")
    assert module_of_decode().endswith("my_engine.attention.reference")
    use("attention.decode")
    assert module_of_decode().endswith("my_engine.attention.triton_kernels")


def test_naming_the_kernel_where_it_does_not_run_says_so(solved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    use("attention.decode", "8.3")
    assert "taken on a GPU, or with TRITON_INTERPRET=1" in capsys.readouterr().out
    assert module_of_decode().endswith("my_engine.attention.reference")


@pytest.mark.usefixtures("triton_runs", "solved")
@pytest.mark.parametrize(("interpret", "words"), [("0", "needs an NVIDIA GPU"), ("1", "in bfloat16 gives wrong numbers")])
def test_the_engine_refuses_kernels_that_do_not_run_as_asked(
    monkeypatch: pytest.MonkeyPatch, interpret: str, words: str
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    backend = get_backend("reference", "cpu", torch.bfloat16)
    with pytest.raises(ValueError, match=rf"attention\.decode component .*triton_kernels\) {words}"):
        replace_parts(backend, components(), MODEL, "cpu", torch.bfloat16)
    kept = Components({"attention.decode": components()["write_kv"]})
    replace_parts(backend, kept, MODEL, "cpu", torch.bfloat16)


def test_what_the_cell_gives_is_the_engines_to_the_letter() -> None:
    """So that my_engine takes the answer out of the cell and leaves the rest."""
    (cell,) = [cell for cell in read_source(SOLUTIONS / "08_triton_kernel.py").cells if cell.exercise == "8.3"]
    theirs = (engine.REFERENCE / "attention" / "triton_kernels.py").read_text(encoding="utf-8")
    given, wanted = (find_function(ast.parse(text), "decode_kernel") for text in (cell.text, theirs))
    assert given is not None and wanted is not None
    assert ast.dump(given) == ast.dump(wanted)


def test_the_solutions_file_is_minivllms(solved: Path) -> None:
    """Answers that come from minivllm by name leave nothing in a diff but where they are from."""
    mine = (solved / "my_engine" / "attention" / "triton_kernels.py").read_text(encoding="utf-8")
    assert "decode_kernel_8_3" not in mine and "import triton" not in mine.replace("import tl, triton", "")
    theirs = (engine.REFERENCE / "attention" / "triton_kernels.py").read_text(encoding="utf-8")
    for name in ("decode_kernel", "split_kernel", "paged_decode", "prefill_kernel"):
        found, wanted = (find_function(ast.parse(text), name) for text in (mine, theirs))
        assert found is not None and wanted is not None and ast.dump(found) == ast.dump(wanted)


@pytest.mark.slow
def test_the_students_kernels_equal_the_reference_in_the_interpreter(solved: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted_lab_08.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE.parents[1], env=environment)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_text_is_served_with_the_students_kernel(smollm2: Path, solved: Path) -> None:
    """Through the interpreter, in another process: the words are minivllm's; with a kernel that reads keys as values, not."""
    from minivllm import LLM, SamplingParams

    prompts = ["The capital of France is"]
    with LLM(str(smollm2), dtype="float32", max_model_len=128, num_gpu_blocks_override=33) as llm:
        (reply,) = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    expected = list(reply.outputs[0].token_ids)
    asked = {"model": str(smollm2), "prompts": prompts, "max_tokens": 3}
    mine = kernels.interpreted("answer", **asked)
    assert mine["part"] == "my_engine.attention.triton_kernels.paged_decode"
    assert mine["token_ids"] == [expected]
    wrong = answer_source(find("8.3")).replace("tl.load(values + offsets", "tl.load(keys + offsets")
    save_answer(find("8.3"), wrong)
    assert kernels.interpreted("answer", **asked)["token_ids"] != [expected]


# ------------------------------------------------------------------------------------------------- where there is no Triton


def test_without_triton_the_exercises_cells_run_and_say_that_they_are_skipped(run_cells: Callable[..., list[str]]) -> None:
    lab = nbformat.read(HERE.parents[1] / "labs" / "08_triton_kernel.ipynb", as_version=4)
    cells = {cell.id: cell.source for cell in lab.cells}
    gone = "import sys; sys.modules['triton'] = None"
    exercises = [cells[f"exercise-8-{n}"] for n in (1, 3, 4)]
    shown = run_cells(gone, *exercises, cells["exercise-8-2"], "import minivllm.attention.triton_kernels")
    for text in shown[1:4]:
        assert "is skipped on this machine: it needs Triton, which is not installed." in text
    assert "Not attempted yet" in shown[4]  # 8.2 needs none
    assert shown[5] == ""


def test_without_triton_a_cell_that_needs_the_kernels_says_so(monkeypatch: pytest.MonkeyPatch, student: Path) -> None:
    monkeypatch.setattr("minivllm.attention.triton_utils.HAS_TRITON", False)
    monkeypatch.setattr("minivllm.attention.triton_utils.sys.platform", "darwin")
    assert CHECKS["8.3"].why_not() == "needs Triton, which has packages for Linux only (this is darwin)."
    assert CHECKS["8.2"].why_not() is None
    with pytest.raises(CheckFailed, match="This cell needs Triton"):
        kernels.my_kernels()
