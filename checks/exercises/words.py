"""Numbers and answers in sentences for students: "1 token", "no blocks", "twice", "a list of 100". Knows no lab."""

from __future__ import annotations

import textwrap
from typing import Any

from checks.sandbox.plain import Opaque

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


def numbers(row: Any, n: int = 4, spec: str = ".3g") -> str:
    """The first n elements of a tensor's row: "[0.5, 1.25, -3, 0, ...]"."""
    return f"[{', '.join(f'{x:{spec}}' for x in row.tolist()[:n])}{', ...' if len(row) > n else ''}]"


def kind_of(value: Any) -> str:
    """ "a list", "an int"; of what is not plain data its type."""
    name = value.type_name if isinstance(value, Opaque) else type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def described(value: Any) -> str:
    """What stands where an answer of another type should be: a short one in full, of a long one its kind and length."""
    if value is None:
        return "None (is a `return` missing?)"
    if type(value).__name__ == "Tensor":  # by its name: most labs need no torch
        return f"a tensor of shape {list(value.shape)}"
    text = "" if isinstance(value, Opaque) else repr(value)
    if 0 < len(text) < 60:
        return text
    return kind_of(value) + (f" of {len(value)}" if hasattr(value, "__len__") else "")
