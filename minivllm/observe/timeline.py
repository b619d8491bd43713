"""The four figures of a trace, drawn with matplotlib from the data alone. Used in Labs 05 and 06. May not know the engine.

    plot_timeline    a lane for each request: waiting, prefill, decode, preempted
    plot_budget      a bar for each step: the tokens it computed, against the budget
    plot_block_map   block x step, coloured by the request that holds it
    plot_itl         the latency of every token, and which of them had a prefill beside them

Each draws into `ax`, or into a figure of its own (`plot_timeline(trace).figure`), and returns the Axes. None needs pyplot or a
display. `alt_text(plot_timeline, trace)` says what a figure shows. No meaning hangs on colour alone: kinds differ in hatch,
height or marker too, and the colours (Okabe and Ito's) differ in lightness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from minivllm.bench.metrics import percentile
from minivllm.observe.captions import block_map_alt_text, budget_alt_text, itl_alt_text, timeline_alt_text
from minivllm.observe.lanes import DECODE, IDLE, PREEMPTED, PREFILL, WAITING, Lane, lanes
from minivllm.observe.palette import BLUE, FREE_COLOR, GREEN, ORANGE, PINK, RED, SHARED_COLOR, owner_color
from minivllm.observe.trace import StepRecord, Trace

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 7.4  # inches: the width of a notebook's cell

# kind -> colour, hatch, height of the bar in its lane
_STYLES: dict[str, tuple[str, str, float]] = {
    WAITING: ("#C8C8C8", "", 0.16),
    PREFILL: (BLUE, "////", 0.74),
    DECODE: (ORANGE, "", 0.74),
    IDLE: ("#6E6E6E", "", 0.16),
    PREEMPTED: ("#F6C9AE", "xxxx", 0.40),
}
_LABELS = {
    WAITING: "waiting",
    PREFILL: "prefill",
    DECODE: "decode",
    IDLE: "running, no tokens this step",
    PREEMPTED: "preempted, waiting again",
}


def plot_timeline(trace: Trace, ax: Axes | None = None, *, x: str = "time") -> Axes:
    """A lane for each request, in order of arrival. x: "time" (seconds) or "step"."""
    index = _axis(x)
    every = lanes(trace)
    ax = ax or _new_axes(height=timeline_height(len(every)))
    shown = set()
    for row, lane in enumerate(every):
        shown |= _draw_lane(ax, row, lane, index)
    _mark(ax, [(at[index], row) for row, lane in enumerate(every) for at in lane.hits], "d", GREEN, "prefix found in cache")
    _mark(ax, [(at[index], row) for row, lane in enumerate(every) for at in lane.preemptions], "X", RED, "preempted")
    ended = [(lane.end[index], row) for row, lane in enumerate(every) if lane.end and _is_served(lane)]
    failed = [(lane.end[index], row) for row, lane in enumerate(every) if lane.end and not _is_served(lane)]
    _mark(ax, ended, "|", "black", "end", size=70)
    _mark(ax, failed, "*", "black", "aborted or failed", size=45)
    _label_rows(ax, [lane.request.request_id for lane in every])
    _finish_x(ax, trace, x)
    handles, labels = ax.get_legend_handles_labels()
    kinds = [kind for kind in _STYLES if kind in shown]
    handles = [_swatch(*_STYLES[kind][:2], edge="white", linewidth=0) for kind in kinds] + handles
    _legend(ax, handles, [_LABELS[kind] for kind in kinds] + labels)
    return ax


def plot_budget(trace: Trace, ax: Axes | None = None, *, x: str = "step") -> Axes:
    """A bar for each step: decode, draft and prefill tokens, against max_num_batched_tokens. x: "step", or "time" (a bar is as
    wide as its step took)."""
    index = _axis(x)
    ax = ax or _new_axes(height=2.9)
    places = [_extent(place, step, index) for place, step in enumerate(trace.steps)]
    drafts = [sum(tokens.num_drafts for tokens in step.tokens.values()) for step in trace.steps]
    decodes = [step.num_decode_tokens - d for step, d in zip(trace.steps, drafts, strict=True)]
    prefills = [step.num_prefill_tokens for step in trace.steps]
    bottom = [0] * len(places)
    for label, heights, color, hatch in (
        ("decode", decodes, ORANGE, ""),
        ("drafts to verify", drafts, PINK, "...."),
        ("prefill", prefills, BLUE, "////"),
    ):
        if any(heights):
            _draw_bars(ax, places, heights, bottom, facecolor=color, hatch=hatch, label=label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    most = max(bottom, default=0)
    _draw_budget(ax, trace.max_num_batched_tokens, most)
    crosses = [
        (begin, total + 0.03 * most)
        for (begin, _), total, step in zip(places, bottom, trace.steps, strict=True)
        if step.preempted
    ]
    _mark(ax, crosses, "X", RED, "preemption")
    ax.set_ylabel("tokens in the step")
    _finish_x(ax, trace, x)
    _legend(ax, *ax.get_legend_handles_labels())
    return ax


def plot_block_map(trace: Trace, ax: Axes | None = None, *, x: str = "step") -> Axes:
    """A row for each block, a column for each step; the colour is the request that holds the block after the step. Blocks above
    the highest one ever used are left out. x: "step" only: a picture of cells has no room for durations."""
    if x != "step":
        raise ValueError(f'plot_block_map has one column a step: x must be "step", got {x!r}.')
    owners = list(trace.requests)
    grid = _owner_grid(trace, owners)
    num_rows, num_steps = grid.shape
    ax = ax or _new_axes(height=min(6.0, 1.9 + 0.05 * num_rows))
    ax.imshow(
        _colored(grid, len(owners)),
        aspect="auto",
        interpolation="nearest",
        origin="lower",
        extent=(0, num_steps, 0.5, num_rows + 0.5),
    )
    for text, column, row in _owner_labels(grid, owners):
        ax.text(column, row, text, ha="center", va="center", fontsize=7, color="black", bbox=_LABEL_BOX, zorder=5)
    lost = [(place + 0.5, block) for place, step in enumerate(trace.steps) for block in step.evicted]
    _mark(ax, lost, "x", "black", "cached block evicted", size=9 if len(lost) < 400 else 2, edge=0.7)
    for place, step in enumerate(trace.steps):
        if step.preempted:
            ax.axvline(place, color=RED, linestyle="--", linewidth=1.0, label="preemption")
    ax.set_ylabel("block")
    ax.grid(False)
    _finish_x(ax, trace, x)
    named = {"free": _swatch(FREE_COLOR, edge="#999999")}
    if (grid == _SHARED).any():
        named["shared by several"] = _swatch(SHARED_COLOR)
    handles, labels = ax.get_legend_handles_labels()
    named |= zip(labels, handles, strict=True)  # one of each, however many lines there are
    _legend(ax, list(named.values()), list(named))
    return ax


def plot_itl(trace: Trace, ax: Axes | None = None) -> Axes:
    """The latency of each token at the time it came: since the token before, or since arrival for the first. Told apart are
    tokens whose step computed somebody's prompt too (a prefill beside you is what you wait for), and those before which their
    own request was preempted."""
    ax = ax or _new_axes(height=3.1)
    points = _latency_points(trace)
    for kind, marker, color, label, size in (
        (_ALONE, "o", ORANGE, "ITL, all decode", 13),
        (_BESIDE, "^", BLUE, "ITL, a prefill in the step", 22),
        (_AFTER_PREEMPTION, "X", RED, "ITL, preempted before it", 30),
        (_FIRST, "D", GREEN, "TTFT", 22),
    ):
        _mark(ax, points[kind], marker, color, label, size=size, edge=0.3)
    gaps = [latency for kind in (_ALONE, _BESIDE, _AFTER_PREEMPTION) for _, latency in points[kind]]
    for p, style, side in ((50, ":", "top"), (99, "--", "bottom")) if gaps else ():
        value = percentile(gaps, p)
        ax.axhline(value, color="#555555", linewidth=0.9, linestyle=style)
        text = f"ITL p{p}\n{value:.3g} ms"
        ax.text(1.015, value, text, fontsize=7, ha="left", va=side, transform=ax.get_yaxis_transform())
    every = [latency for kind in points for _, latency in points[kind] if latency > 0]
    if every and max(every) > 20 * percentile(every, 50):
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        ax.set_ylim(bottom=0)
    ax.set_ylabel("latency of the token (ms)")
    _finish_x(ax, trace, "time")
    _legend(ax, *ax.get_legend_handles_labels())
    return ax


_ALT_TEXTS: dict[Any, Callable[[Trace], str]] = {
    plot_timeline: timeline_alt_text,
    plot_budget: budget_alt_text,
    plot_block_map: block_map_alt_text,
    plot_itl: itl_alt_text,
}


def alt_text(plot: Callable[..., Any], trace: Trace) -> str:
    """What the figure `plot(trace)` shows, in words: `alt_text(plot_timeline, trace)`."""
    if plot not in _ALT_TEXTS:
        raise ValueError(f"{plot!r} is not one of {', '.join(known.__name__ for known in _ALT_TEXTS)}.")
    return _ALT_TEXTS[plot](trace)


# ---------------------------------------------------------------------- parts of the timeline


def _draw_lane(ax: Axes, row: int, lane: Lane, index: int) -> set[str]:
    """The spans of one request; returns the kinds that were drawn."""
    shown = set()
    for span in lane.spans:
        begin, end = span.times if index else span.steps
        color, hatch, height = _STYLES[span.kind]
        if end > begin:
            ax.barh(row, end - begin, height, begin, color=color, hatch=hatch, edgecolor="white", linewidth=0.0)
            shown.add(span.kind)
    return shown


def _is_served(lane: Lane) -> bool:
    return lane.request.finish_reason in ("stop", "length")


def _label_rows(ax: Axes, names: Sequence[str]) -> None:
    every = max(1, -(-len(names) // 24))  # no more names than can be read
    ax.set_yticks(range(0, len(names), every), names[::every], fontsize=8)
    ax.set_ylim(len(names) - 0.4, -0.6)  # the first to arrive is on top
    ax.set_ylabel("request")
    ax.grid(axis="x", color="#dddddd", linewidth=0.8)
    ax.grid(False, axis="y")


def timeline_height(num_lanes: int) -> float:
    """Inches: room for a lane each, up to what fits on a screen."""
    return min(12.0, 1.25 + 0.24 * max(num_lanes, 3))


# ---------------------------------------------------------------------- parts of the others


def _draw_bars(ax: Axes, places: Sequence[tuple[float, float]], heights: list[int], bottom: list[int], **style: Any) -> None:
    """A bar each; a single outline where there are more than could be seen apart."""
    if len(places) <= _MAX_BARS:
        left, width = [begin for begin, _ in places], [end - begin for begin, end in places]
        edge = 0.4 if len(places) < 120 else 0.0
        ax.bar(left, heights, width, bottom, align="edge", edgecolor="white", linewidth=edge, **style)
        return
    edges = [places[0][0], *(end for _, end in places)]
    top = [low + height for low, height in zip(bottom, heights, strict=True)]
    ax.fill_between(edges, [*bottom, 0], [*top, 0], step="post", edgecolor="white", linewidth=0.0, **style)


def _draw_budget(ax: Axes, budget: int, most: int) -> None:
    """The limit as a line; where the bars stay far below it, they get the room and the limit is only told."""
    ax.set_ylim(0, 1.08 * max(most, 1))
    if not budget:
        return
    if most >= budget / 4:
        ax.axhline(budget, color="black", linestyle="--", linewidth=1.0, label=f"budget: {budget}")
        ax.set_ylim(0, 1.12 * max(most, budget))
    else:
        ax.plot([], [], color="black", linestyle="--", linewidth=1.0, label=f"budget: {budget}, far above")


_FREE, _SHARED = -1, -2
_MAX_BARS = 300
_LABEL_BOX = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}


def _owner_grid(trace: Trace, owners: Sequence[str]) -> np.ndarray:
    """[blocks, steps]: the number of the request that holds a block after a step, or _FREE or _SHARED. Row 0 is block 1."""
    import numpy as np

    number = {request_id: i for i, request_id in enumerate(owners)}
    highest = max((block for step in trace.steps for table in step.blocks.values() for block in table), default=1)
    highest = min(trace.num_blocks - 1, highest + 2) if trace.num_blocks > 1 else highest  # a free row or two on top
    grid = np.full((highest, max(len(trace.steps), 1)), _FREE)
    for place, step in enumerate(trace.steps):
        for request_id, table in step.blocks.items():
            rows = np.array(table, dtype=int) - 1
            grid[rows, place] = np.where(grid[rows, place] == _FREE, number[request_id], _SHARED)
    return grid


def _colored(grid: np.ndarray, num_owners: int) -> np.ndarray:
    """[blocks, steps, 3]: red, green and blue."""
    import numpy as np
    from matplotlib.colors import to_rgb

    colors = [owner_color(i) for i in range(num_owners)] + [SHARED_COLOR, FREE_COLOR]  # the last two are found at -2 and -1
    picture: np.ndarray = np.array([to_rgb(color) for color in colors])[grid]
    return picture


def _owner_labels(grid: np.ndarray, owners: Sequence[str]) -> list[tuple[str, float, float]]:
    """A name for each request, (text, step, block), on its largest patch; none where it would not fit or hide another."""
    import numpy as np

    placed: list[tuple[str, float, float]] = []
    num_rows, num_steps = grid.shape
    for number, name in enumerate(owners):
        rows, steps = np.nonzero(grid == number)
        if not len(rows):
            continue
        step, row = _middle_of_patch(rows, steps)
        width, height = 0.02 + 0.012 * len(name), 0.05
        if all(abs(step - s) > width * num_steps or abs(row - r) > height * num_rows for _, s, r in placed):
            placed.append((name, step, row))
    return placed


def _middle_of_patch(rows: np.ndarray, steps: np.ndarray) -> tuple[float, float]:
    """(step, block) in the longest run of neighbouring blocks; of equal ones, in the step that is nearest to the middle."""
    import numpy as np

    best = (0, 0.0, 0.0, 0.0)  # length, closeness, step, block
    seen = np.unique(steps)
    for step in seen[:: -(-len(seen) // 16)]:  # a look at some is enough
        held = np.sort(rows[steps == step])
        for run in np.split(held, np.nonzero(np.diff(held) > 1)[0] + 1):
            best = max(best, (len(run), -abs(step - np.median(steps)), step + 0.5, run.mean() + 1))
    return best[2], best[3]


_ALONE, _BESIDE, _AFTER_PREEMPTION, _FIRST = "alone", "beside a prefill", "after a preemption", "first"


def _latency_points(trace: Trace) -> dict[str, list[tuple[float, float]]]:
    """(time, ms) of every token, by what happened in its step."""
    points: dict[str, list[tuple[float, float]]] = {_ALONE: [], _BESIDE: [], _AFTER_PREEMPTION: [], _FIRST: []}
    num_seen = dict.fromkeys(trace.requests, 0)
    for step in trace.steps:
        for request_id, tokens in step.sampled.items():
            request, seen = trace.requests[request_id], num_seen[request_id]
            num_seen[request_id] += len(tokens)
            times = request.token_times[seen : seen + len(tokens)]
            if seen == 0 and request.ttft is not None:
                points[_FIRST].append((times[0], request.ttft * 1000))
            if seen == 0 or not step.num_prefill_tokens:
                kind = _ALONE
            else:
                kind = _AFTER_PREEMPTION if step.tokens[request_id].is_prefill else _BESIDE
            since = request.token_times[max(0, seen - 1) : seen]
            points[kind] += [(after, (after - before) * 1000) for before, after in pairwise(since + times)]
    return points


# ---------------------------------------------------------------------- common to all


def _axis(x: str) -> int:
    """Which number of a (step, time) is drawn along x."""
    if x not in ("step", "time"):
        raise ValueError(f'x must be "time" or "step", got {x!r}.')
    return 1 if x == "time" else 0


def _extent(place: int, step: StepRecord, index: int) -> tuple[float, float]:
    return (step.start, step.end) if index else (place, place + 1)


def new_figure(height: float, ratios: Sequence[float] = (1,)) -> tuple[Figure, list[Axes]]:
    """A figure as wide as a notebook's cell, with one axes above the other in the given ratios of height. It is not pyplot's,
    so nothing is kept alive or shown by itself."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Figures of a trace need matplotlib: pip install 'minivllm[labs]'") from error
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    every = list(figure.subplots(len(ratios), 1, squeeze=False, height_ratios=ratios)[:, 0])
    for ax in every:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="#dddddd", linewidth=0.8)
        ax.set_axisbelow(True)
    return figure, every


def _new_axes(height: float) -> Axes:
    return new_figure(height)[1][0]


def _mark(
    ax: Axes, points: Sequence[tuple[float, float]], marker: str, color: str, label: str, size: float = 40, edge: float = 0.5
) -> None:
    if not points:
        return
    xs, ys = [x for x, _ in points], [y for _, y in points]
    style: dict[str, Any] = {"color": color, "linewidths": 1.6 if marker == "|" else edge}
    if marker not in "|x":  # those are lines alone
        style["edgecolors"] = "white"
    ax.scatter(xs, ys, s=size, marker=marker, label=label, zorder=3, clip_on=False, **style)


def _swatch(color: str, hatch: str = "", edge: str | None = None, linewidth: float = 1.0) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=color, hatch=hatch, edgecolor=edge, linewidth=linewidth)


def _finish_x(ax: Axes, trace: Trace, x: str) -> None:
    if x == "step":
        ax.set_xlabel("step")
        ax.set_xlim(0, max(len(trace.steps), 1))
        ax.locator_params(axis="x", integer=True)
        return
    ax.set_xlabel("time (s)")
    begin = min((request.arrival for request in trace.requests.values()), default=0.0)
    ax.set_xlim(begin, max(trace.duration, begin + 1e-9))


def _legend(ax: Axes, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Above the figure, where it hides nothing."""
    if handles:
        ax.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(0, 1.01),
            ncols=5 if len(handles) == 5 else 4,
            fontsize=8,
            frameon=False,
            borderaxespad=0.0,
        )
