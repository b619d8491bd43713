"""A student who wrote what the solutions say, and a minivllm without what they replace: then nothing else did the work."""

from __future__ import annotations

from typing import Any

import pytest

from checks.authoring.source import answer_source
from checks.exercises import find
from checks.student.engine import components, save_answer
from minivllm.components import Components


def solved(*exercises: str) -> Components:
    """The parts of a student (the fixture `student`) who wrote what the solutions say."""
    for exercise in exercises:
        save_answer(find(exercise), answer_source(find(exercise)))
    return components()


def own_part(*arguments: Any, **keywords: Any) -> Any:
    raise AssertionError("minivllm's own part was called")


def gone(monkeypatch: pytest.MonkeyPatch, owner: Any, *names: str) -> None:
    """The owner's (a class's, a module's) functions fail when they are called."""
    for name in names:
        monkeypatch.setattr(owner, name, own_part)
