"""What the running notebook tells us: the source of the cell that called, and the names that exist beside it."""

from __future__ import annotations

import linecache
import sys
from types import ModuleType
from typing import Any

from checks.student.failure import CheckFailed


def calling_cell(what: str) -> tuple[str, dict[str, Any]]:
    """The source of the cell that called the function that called this, and the notebook's namespace.

    It comes from the frame itself: every kernel (JupyterLab, VS Code, nbclient, nbval, Colab) compiles a cell under a name of
    its own and leaves the text with `linecache`. So it is right for any cell, run in any order.
    """
    frame = sys._getframe(2)
    if frame.f_code.co_name != "<module>":
        raise CheckFailed(
            f"{what} belongs on the last line of the exercise's cell, at the left margin (not inside a function)."
        )
    source = "".join(linecache.getlines(frame.f_code.co_filename)) or _last_input()
    if not source:
        raise CheckFailed(f"{what} reads the notebook cell it stands in, and there is none here. Run it in a notebook.")
    return source, frame.f_globals


def calling_namespace() -> dict[str, Any]:
    """The notebook's names, for what puts one there (skip)."""
    return sys._getframe(2).f_globals


def _last_input() -> str:
    shell = current_shell()
    inputs = shell.user_ns.get("In", []) if shell is not None else []
    return str(inputs[-1]) if inputs else ""


def current_shell() -> Any:
    """IPython's shell, or None outside of it. Does not import IPython."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def names_in(namespace: dict[str, Any]) -> dict[str, str]:
    """The student's names, each "module" or "value"."""
    hidden = {"In", "Out", "exit", "quit", "open", "get_ipython"}
    return {
        name: "module" if isinstance(value, ModuleType) else "value"
        for name, value in list(namespace.items())
        if not name.startswith("_") and name not in hidden
    }
