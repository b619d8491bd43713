"""The labs' other half: what a notebook imports, the exercises' checks, and how notebooks are made.

    from checks import check, hint, skip, solution, predict, quiz, start, progress, reset, use

    student/     the verbs above and the student's folder      exercises/   cases, judges, hints
    sandbox/     runs a cell in a process that can be killed   quizzes/     questions, with a word on every answer
    authoring/   python -m checks build                        __main__.py  build, status

Used from a clone; the wheel contains minivllm only. Names are resolved on first use, so that importing one costs little.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "check": "checking",
    "CheckFailed": "failure",
    "hint": "help",
    "skip": "help",
    "solution": "help",
    "reset": "help",
    "need": "help",
    "answer_text": "help",
    "predict": "quiz",
    "recall": "quiz",
    "quiz": "quiz",
    "components": "engine",
    "use": "engine",
    "show_diff": "engine",
    "start": "lab",
    "whose": "lab",
    "serve": "server",
    "need_serving": "server",
    "my_kernels": "kernels",
    "interpreted": "kernels",
    "progress": "overview",
    "show": "figures",
    "new_figure": "figures",
    "live": "figures",
    "save_result": "results",
    "journey": "results",
    "reference_results": "results",
}
__all__ = [
    "CheckFailed", "answer_text", "check", "components", "hint", "interpreted", "journey", "live", "my_kernels", "need",
    "need_serving", "new_figure", "predict", "progress", "quiz", "recall", "reference_results", "reset", "save_result",
    "serve", "show", "show_diff", "skip", "solution", "start", "use", "whose",
]  # fmt: skip

if TYPE_CHECKING:
    from checks.student.checking import check
    from checks.student.engine import components, show_diff, use
    from checks.student.failure import CheckFailed
    from checks.student.figures import live, new_figure, show
    from checks.student.help import answer_text, hint, need, reset, skip, solution
    from checks.student.kernels import interpreted, my_kernels
    from checks.student.lab import start, whose
    from checks.student.overview import progress
    from checks.student.quiz import predict, quiz, recall
    from checks.student.results import journey, reference_results, save_result
    from checks.student.server import need_serving, serve


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"checks.student.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'checks' has no attribute {name!r}")
