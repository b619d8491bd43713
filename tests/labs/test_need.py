"""need("1.1"): cells that build on earlier exercises work after a restart and without them, and say whose function they use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MINE = """from checks import check

FACTOR = 2


def double(x):
    return x * FACTOR


check("0.0")"""
CELL = "from checks import need\nneed('0.0')\nprint(double(4))"


def test_what_the_notebook_has_is_used_without_a_word(kernel: Any, student: Path) -> None:
    assert kernel.run(MINE, CELL)[1] == "8\n"


def test_after_a_restart_the_saved_answer_is_used(kernel: Any, student: Path) -> None:
    kernel.run(MINE)
    kernel.run("%reset -f")
    (shown,) = kernel.run(CELL)
    assert "Exercise 0.0 has passed" in shown and "your saved double" in shown and shown.endswith("8\n")


def test_what_is_not_passed_is_the_reference_whatever_stands_in_the_notebook(kernel: Any, student: Path) -> None:
    (shown,) = kernel.run("def double(x):\n    raise NotImplementedError\n\n\n" + CELL)
    assert "Exercise 0.0 is not passed yet: using the reference double." in shown and shown.endswith("8\n")


def test_functions_of_the_engine_are_found_too(kernel: Any, student: Path) -> None:
    (shown,) = kernel.run("from checks import need\nneed('1.1', '1.3')\nprint(apply_rope.__module__, decoder_layer.__module__)")
    assert shown.endswith("minivllm.models.rope minivllm.models.decoder\n")
