"""`triton` and `tl` (triton.language), or where there is no Triton (macOS, Windows) stand-ins: kernels can then be written down
and imported, and say why they cannot be launched. Lab 08's cells and `triton_kernels.py` import them from here. May know
nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["HAS_TRITON", "tl", "triton", "why_no_triton"]

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False


def why_no_triton() -> str:
    """What stands in for an import error, as the end of a sentence."""
    if sys.platform != "linux":
        return f"needs Triton, which has packages for Linux only (this is {sys.platform})."
    return "needs Triton, which is not installed. To fix: pip install triton."


class _Kernel:
    """A kernel that nothing can compile."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.__name__ = fn.__name__

    def __getitem__(self, grid: object) -> Any:
        raise RuntimeError(f"{self.__name__} {why_no_triton()}")


class _Language:
    """Enough of triton.language for annotations. The bodies of kernels are never run."""

    constexpr = "constexpr"


class _Triton:
    @staticmethod
    def jit(fn: Callable[..., Any] | None = None, **options: object) -> Any:
        return _Kernel if fn is None else _Kernel(fn)

    @staticmethod
    def next_power_of_2(n: int) -> int:
        return 1 << (n - 1).bit_length()


if not HAS_TRITON:
    triton, tl = _Triton(), _Language()
