"""A student's formula for a numeric question: `quiz("4.q4", lambda requests, tokens: ...)`. Runs in the child."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def run(module: ModuleType, case: dict[str, Any]) -> Any:
    """What the cell's `formula` gives for the drawn numbers."""
    found = module.formula(**case["numbers"])
    return found.item() if hasattr(found, "item") else found


RUN = {"formula": run}
