"""tests/mistakes/: wrong answers that look right, each told what is wrong with it, and right answers written differently.

The first line of a file is `# expect: words`, which must stand in what the student is told, or `# expect: passed`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from checks.exercises import find, has_checks, table
from checks.exercises.evaluate import evaluate

MISTAKES = Path(__file__).resolve().parents[1] / "mistakes"
FILES = sorted(MISTAKES.glob("ex_*/*.py"))


def exercise_of(path: Path) -> str:
    return path.parent.name.removeprefix("ex_").replace("_", ".")


def expected_words(path: Path) -> list[str]:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# expect: "), f"{path} does not say what it must be told"
    return first.removeprefix("# expect: ").split("|")


SEEDS = range(1, 20 if os.environ.get("HYPOTHESIS_PROFILE") == "fuzz" else 4)
WRONG = [path for path in FILES if expected_words(path) != ["passed"]]
RIGHT = [path for path in FILES if expected_words(path) == ["passed"]]


def names(paths: list[Path]) -> list[str]:
    return [f"{path.parent.name}-{path.stem}" for path in paths]


def assert_told(path: Path, seed: int) -> None:
    report = evaluate(find(exercise_of(path)), path.read_text(encoding="utf-8"), seed=seed)
    assert not report.passed
    assert any(words in report.verdict.message for words in expected_words(path)), report.verdict.message


@pytest.mark.parametrize("path", WRONG, ids=names(WRONG))
def test_a_wrong_answer_is_told_what_is_wrong(path: Path) -> None:
    assert_told(path, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("path", WRONG, ids=names(WRONG))
def test_a_wrong_answer_is_rejected_with_any_seed(path: Path) -> None:
    for seed in SEEDS:
        report = evaluate(find(exercise_of(path)), path.read_text(encoding="utf-8"), seed=seed)
        assert not report.passed
        if report.verdict.category == "time":
            break  # what never ends costs the whole limit each time


@pytest.mark.parametrize("path", RIGHT, ids=names(RIGHT))
def test_a_right_answer_of_another_form_passes(path: Path) -> None:
    for seed in range(3):
        report = evaluate(find(exercise_of(path)), path.read_text(encoding="utf-8"), seed=seed)
        assert report.passed, report.verdict.message


@pytest.mark.parametrize("exercise", [i for i, row in table().items() if has_checks(row.lab)])
def test_every_exercise_has_three_mistakes_and_a_right_answer_of_another_form(exercise: str) -> None:
    found = [expected_words(path) == ["passed"] for path in FILES if exercise_of(path) == exercise]
    assert found.count(False) >= 3
    assert found.count(True) >= 1
