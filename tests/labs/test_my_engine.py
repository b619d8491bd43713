"""my_engine/: the reference's file with the student's functions in it, whatever names the student chose."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checks.authoring.source import answer_source
from checks.exercises import find, table
from checks.student.checking import where
from checks.student.engine import REFERENCE, Answer, assemble, components, overtaken_by, save_answer, show_diff, use
from checks.student.failure import CheckFailed
from checks.student.lab import whose
from minivllm.components import load_file

REFERENCE_TEXT = (REFERENCE / "sampling" / "logits.py").read_text()
TOP_P = """import torch

def apply_top_p(logits, p):
    return logits + 1
"""


def loaded(tmp_path: Path, *answers: tuple[str, str]) -> object:
    path = tmp_path / "logits.py"
    path.write_text(assemble(REFERENCE_TEXT, [Answer(find(exercise), source) for exercise, source in answers]))
    return load_file(path)


def test_what_was_not_passed_is_the_reference(tmp_path: Path) -> None:
    module = loaded(tmp_path, ("2.3", TOP_P))
    zeros = torch.zeros(1, 2)
    assert torch.equal(module.apply_top_p(zeros, torch.ones(1)), zeros + 1)
    assert module.apply_top_k(torch.tensor([[1.0, 2.0]]), torch.tensor([1])).tolist() == [[float("-inf"), 2.0]]


def test_helpers_imports_and_constants_come_along(tmp_path: Path) -> None:
    source = "import math\nimport torch\n\nSHIFT = math.pi\n\ndef shift(x):\n    return x + SHIFT\n\n" + TOP_P.replace(
        "logits + 1", "shift(logits)"
    )
    assert loaded(tmp_path, ("2.3", source)).apply_top_p(torch.zeros(1, 1), torch.ones(1)).item() == pytest.approx(
        3.14159, abs=1e-4
    )


def test_a_helper_named_like_the_references_own_does_not_disturb_it(tmp_path: Path) -> None:
    source = "REMOVED = 0.0\n\ndef apply_min_p(x):\n    return x + 5\n\n" + TOP_P.replace(
        "logits + 1", "apply_min_p(logits) + REMOVED"
    )
    module = loaded(tmp_path, ("2.3", source))
    assert module.apply_top_p(torch.zeros(1, 1), torch.ones(1)).item() == 5
    assert float("-inf") == module.REMOVED
    assert module.apply_min_p(torch.tensor([[0.0, -9.0]]), torch.tensor([0.5])).tolist() == [[0.0, float("-inf")]]


def test_two_answers_with_helpers_of_one_name_keep_their_own(tmp_path: Path) -> None:
    one = (
        "def h(x):\n    return x + 1\n\n"
        "def apply_top_k(logits, k):\n    return h(logits)\n\n"
        "def apply_temperature(logits, t):\n    return h(logits)\n"
    )
    two = "def h(x):\n    return x + 100\n\ndef apply_top_p(logits, p):\n    return h(logits)\n"
    module = loaded(tmp_path, ("2.2", one), ("2.3", two))
    zero = torch.zeros(1, 1)
    assert [module.apply_top_k(zero, None).item(), module.apply_top_p(zero, None).item()] == [1, 100]


def test_imported_names_that_collide_are_imported_under_another(tmp_path: Path) -> None:
    source = "from math import sqrt as REMOVED\nfrom operator import neg as mask_tokens\n\n" + TOP_P.replace(
        "logits + 1", "mask_tokens(logits) + REMOVED(4)"
    )
    module = loaded(tmp_path, ("2.3", source))
    assert module.apply_top_p(torch.ones(1, 1), None).item() == 1
    assert float("-inf") == module.REMOVED and module.mask_tokens.__module__ != "_operator"


def test_scratch_lines_of_the_cell_are_left_out(tmp_path: Path) -> None:
    assert loaded(tmp_path, ("2.3", TOP_P + "\nprint(undefined_name)\n")).apply_top_p is not None


def test_an_answer_that_is_no_def_is_refused_and_nothing_is_kept(student: Path) -> None:
    with pytest.raises(ValueError, match="needs apply_top_p as a `def`"):
        save_answer(find("2.3"), "apply_top_p = lambda logits, p: logits\n")
    assert not list(student.rglob("2.3.py")) and dict(components()) == {}


def test_components_follow_what_passed_and_what_use_says(student: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dict(components()) == {}
    save_answer(find("2.3"), TOP_P)
    assert list(components()) == ["sampler"]
    use("sampler", "reference")
    assert dict(components()) == {}
    use("sampler", "2.3")
    assert list(components()) == ["sampler"]
    use("sampler", None)
    assert list(components()) == ["sampler"]
    use("sampler")
    assert list(components()) == ["sampler"]


def test_whose_names_the_answers_that_are_used(student: Path) -> None:
    """Of the same functions the latest lab's, of a stage that a later lab has overtaken none."""
    pool = "class BlockPool:\n{}\n    def allocate(self, n):\n        return []\n\n    def free(self, blocks):\n        pass\n"
    save_answer(table()["4.1"], pool.format("    capabilities = frozenset({'allocate'})\n"))
    assert whose().startswith("block_pool is yours (4.1)")
    later = "class BlockPool:\n    def free(self, blocks):\n        pass\n\n    def touch(self, blocks):\n        pass\n"
    save_answer(table()["7.3"], later)
    assert whose().startswith("block_pool is yours (7.3)")
    use("block_pool", "4.1")
    assert whose().startswith("block_pool is yours (4.1, 7.3)")  # touch() is still the later one's


def test_an_earlier_labs_answer_that_passes_again_is_told_whose_stays(student: Path) -> None:
    for exercise in ("6.2", "5.3"):
        save_answer(find(exercise), answer_source(find(exercise)))
    assert overtaken_by(find("5.3")) == ["6.2"] and overtaken_by(find("6.2")) == []
    assert where(find("5.3")) == "my_engine/core/scheduler.py goes on with your answer to 6.2."
    assert where(find("6.2")) == "Scheduler.schedule now in my_engine/core/scheduler.py."
    use("scheduler", "5.3")
    assert overtaken_by(find("5.3")) == [] and overtaken_by(find("6.2")) == ["5.3"]


def test_use_says_what_there_is_without_a_traceback(student: Path) -> None:
    with pytest.raises(CheckFailed, match=r"does not build the sampler\. These do: 2\.2, 2\.3"):
        use("sampler", "4.5")
    with pytest.raises(CheckFailed, match=r"'sampling' is not a component\. Is 'sampler' meant\? Components are: block_hash, "):
        use("sampling")


def test_the_students_sampler_is_what_the_engine_calls(student: Path) -> None:
    save_answer(find("2.3"), TOP_P.replace("logits + 1", "logits.roll(1, -1)"))
    sampler = components()["sampler"]
    assert sampler.apply_top_p(torch.tensor([[1.0, 2.0]]), None).tolist() == [[2.0, 1.0]]


def test_files_of_forgotten_answers_go_and_others_stay(student: Path) -> None:
    from checks.student.engine import forget_answer

    save_answer(find("2.3"), TOP_P)
    notes = student / "my_engine" / "notes.py"
    notes.write_text("# mine\n")
    forget_answer(find("2.3"))
    assert not (student / "my_engine" / "sampling" / "logits.py").exists() and notes.exists()


def test_the_diff_shows_the_students_lines(student: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_answer(find("2.3"), TOP_P)
    show_diff("sampling/logits.py")
    shown = capsys.readouterr().out
    assert "+    return logits + 1" in shown and "my_engine: " not in shown
