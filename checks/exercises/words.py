"""Numbers in sentences for students: "1 token", "no blocks", "twice"."""

from __future__ import annotations


def count(n: int, thing: str) -> str:
    """ "no tokens", "1 token", "2,000 tokens". `thing` is the singular of a noun that takes an s."""
    return f"{n:,} {thing}{'s' * (n != 1)}" if n else f"no {thing}s"


def times(n: int) -> str:
    """How often: "once", "twice", "3 times"."""
    return {1: "once", 2: "twice"}.get(n, f"{n} times")


def is_or_are(n: int) -> str:
    return "is" if n == 1 else "are"
