"""Numbers in sentences for students: "1 token", "no blocks", "twice"."""

from __future__ import annotations

import textwrap

WIDTH = 96  # columns; a notebook beside its file list shows about a hundred, and breaks longer lines within words


def count(n: int, thing: str) -> str:
    """ "no tokens", "1 token", "2,000 tokens". `thing` is the singular of a noun that takes an s."""
    return f"{n:,} {thing}{'s' * (n != 1)}" if n else f"no {thing}s"


def times(n: int) -> str:
    """How often: "once", "twice", "3 times"."""
    return {1: "once", 2: "twice"}.get(n, f"{n} times")


def wrapped(text: str, indent: str = "") -> str:
    """Prose in lines of at most WIDTH columns, the later ones indented. Lines that begin with a space are tables and code: they
    stay as they are."""
    lines = [
        [line] if line.startswith(" ") else textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False) or [""]
        for line in text.splitlines()
    ]
    return "\n".join(part for parts in lines for part in parts)


def is_or_are(n: int) -> str:
    return "is" if n == 1 else "are"
