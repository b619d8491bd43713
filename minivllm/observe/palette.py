"""The colours of the figures: Okabe and Ito's, which readers who do not tell red from green can tell apart, for they differ in
lightness too. Pure data.
"""

from __future__ import annotations

BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442"
OWNER_COLORS = (BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, "#8C6BB1", "#A6761D")
SHARED_COLOR, FREE_COLOR = "#3A3A3A", "#FFFFFF"


def owner_color(number: int) -> str:
    """The colour of the request that came as number `number`: neighbours differ, each round is lighter than the one before."""
    base = OWNER_COLORS[number % len(OWNER_COLORS)]
    lighter = 0.25 * (number // len(OWNER_COLORS) % 3)
    channels = (int(base[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * lighter):02X}" for c in channels)
