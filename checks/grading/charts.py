"""Two figures as inline SVG: a histogram, and bars in three parts. Each has a title and a description that says its numbers, so
that who cannot see it misses nothing; parts are told apart by pattern as well as by colour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from checks.grading.tables import number

_PATTERNS = (
    '<defs><pattern id="bad" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="var(--bar-bad)"/>'
    '<line x1="0" y1="0" x2="0" y2="6" stroke="var(--back)" stroke-width="2"/>'
    '</pattern><pattern id="open" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<rect width="6" height="6" fill="var(--back)"/><circle cx="3" cy="3" r="1.6" fill="var(--soft)"/></pattern></defs>'
)
_FILLS = ("var(--bar-good)", "url(#bad)", "url(#open)")
_PARTS = ("right", "not right", "not attempted")


@dataclass(frozen=True)
class Split:
    """How many got an item right, wrong, and did not try it."""

    item: str
    right: int
    wrong: int
    open: int

    @property
    def all(self) -> int:
        return self.right + self.wrong + self.open


def bins_of(values: Sequence[float], most: float, wanted: int = 10) -> list[tuple[float, float, int]]:
    """(from, to, how many) over 0..most, at most `wanted` bins of a round width; the last one includes the maximum."""
    if most <= 0:
        return []
    width = next(w for w in _round_widths() if most / w <= wanted)
    edges = [i * width for i in range(math.ceil(most / width) + 1)]
    counts = [0] * (len(edges) - 1)
    for value in values:
        counts[min(int(value / width + 1e-9), len(counts) - 1)] += 1
    return [(edges[i], min(edges[i + 1], most), n) for i, n in enumerate(counts)]


def _round_widths() -> list[float]:
    return [mantissa * 10**power for power in range(-2, 6) for mantissa in (1, 2, 5)]


def histogram(key: str, title: str, bins: Sequence[tuple[float, float, int]], unit: str = "points") -> str:
    """`key` makes the ids of this page unique."""
    width, height, left, base = 640, 220, 44, 170
    step, most = (width - left - 10) / max(len(bins), 1), max((n for *_, n in bins), default=0)
    scale = (base - 24) / max(most, 1)
    parts = [f'<line x1="{left}" y1="{base}" x2="{width - 10}" y2="{base}" stroke="var(--soft)"/>']
    for i, (low, high, n) in enumerate(bins):
        x, tall = left + i * step, n * scale
        parts.append(
            f'<rect x="{x + 2:.1f}" y="{base - tall:.1f}" width="{step - 4:.1f}" height="{tall:.1f}" fill="var(--bar)"/>'
            f'<text x="{x + step / 2:.1f}" y="{base - tall - 6:.1f}" text-anchor="middle">{n or ""}</text>'
            f'<text x="{x:.1f}" y="{base + 18}" text-anchor="middle">{number(low)}</text>'
            + (
                f'<text x="{x + step:.1f}" y="{base + 18}" text-anchor="middle">{number(high)}</text>'
                if i == len(bins) - 1
                else ""
            )
        )
    middle = (left + width - 10) / 2
    parts.append(f'<text x="{middle}" y="{base + 40}" text-anchor="middle">{escape(unit)}</text>')
    parts.append(f'<text x="14" y="{base / 2}" text-anchor="middle" transform="rotate(-90 14 {base / 2})">students</text>')
    last = len(bins) - 1
    told = ", ".join(
        f"{n} with {number(low)} to {'' if i == last else 'under '}{number(high)}" for i, (low, high, n) in enumerate(bins) if n
    )
    return _svg(key, title, f"Students by {unit}: {told or 'none'}.", width, height, "".join(parts))


def stacked(key: str, title: str, splits: Sequence[Split]) -> str:
    """One bar an item, in three parts: right, not right, not attempted."""
    row, left, width = 28, 56, 640
    height, long = 36 + row * len(splits), width - left - 96
    parts = [_PATTERNS.replace('id="', f'id="{key}-')]
    for i, (word, fill) in enumerate(zip(_PARTS, _FILLS, strict=True)):
        start = left + i * 130
        parts.append(f'<rect x="{start}" y="4" width="14" height="14" fill="{_own(fill, key)}" stroke="var(--soft)"/>')
        parts.append(f'<text x="{start + 20}" y="16">{word}</text>')
    for i, split in enumerate(splits):
        y, x = 30 + i * row, float(left)
        parts.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(split.item)}</text>')
        for count, fill in zip((split.right, split.wrong, split.open), _FILLS, strict=True):
            long_part = long * count / split.all if split.all else 0.0
            if count:
                shape = f'x="{x:.1f}" y="{y}" width="{long_part:.1f}" height="20"'
                parts.append(f'<rect {shape} fill="{_own(fill, key)}" stroke="var(--soft)"/>')
            x += long_part
        parts.append(f'<text x="{left + long + 8}" y="{y + 15}">{split.right} of {split.all}</text>')
    told = "; ".join(f"{s.item}: {s.right} right, {s.wrong} not right, {s.open} not attempted" for s in splits)
    return _svg(key, title, told + ".", width, height, "".join(parts))


def _own(fill: str, key: str) -> str:
    return fill.replace("#", f"#{key}-")


def _svg(key: str, title: str, told: str, width: int, height: int, inner: str) -> str:
    return (
        f'<figure><svg role="img" aria-labelledby="{key}-t {key}-d" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" xmlns="http://www.w3.org/2000/svg"><title id="{key}-t">{escape(title)}</title>'
        f'<desc id="{key}-d">{escape(told)}</desc>{inner}</svg><figcaption>{escape(title)}'
        f"<details><summary>The numbers</summary>{escape(told)}</details></figcaption></figure>"
    )
