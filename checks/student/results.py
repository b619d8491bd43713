"""What experiments measured, one small file a lab, and the journey drawn from them.

<home>/results/04.json                        the student's own
labs/reference_results/00-SOME-MACHINE.json   the same of other machines, with a "name" for the legend
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

from checks.student.figures import COLORS, new_figure, show, style
from checks.student.home import ROOT, results_dir, write_atomically

Marks = list[tuple[str, float]]  # label, tokens per second
ONE, MANY = "One request", "Many requests at once, all together"


def save_result(
    lab: str,
    tokens_per_second: float,
    what: str,
    data: dict[str, Any],
    *,
    requests: int = 1,
    alone: float | None = None,
    quantity: str | None = None,
) -> None:
    """Keep an experiment in results/NN.json. `what` says in a few words what ran at `tokens_per_second`, the lab's mark on the
    journey: of one request, or of all `requests` served at once; then `alone` may be what one gets that has the engine to
    itself. A mark that is neither names its `quantity` ("Reading a prompt"). `data` is whatever the plot was drawn from
    (numbers, lists, strings)."""
    if "dtype" in data:
        data = {**data, "dtype": str(data["dtype"]).removeprefix("torch.")}
    own = {"lab": lab, "tokens_per_second": tokens_per_second, "what": what}
    own |= {"requests": requests, "alone": alone, "quantity": quantity}
    fast = os.environ.get("MINIVLLM_FAST", "0") not in ("", "0")
    write_atomically(results_dir() / f"{lab}.json", json.dumps({**data, **own, "shrunk": fast}, indent=1) + "\n")


def read_results() -> list[dict[str, Any]]:
    """The saved results, by lab. A file that cannot be read is left out."""
    return _read(sorted(results_dir().glob("[0-9][0-9].json")))


def reference_results(lab: str) -> list[dict[str, Any]]:
    """The results of a lab ("00") on other machines; `name` says which."""
    return [r for r in _read(sorted((ROOT / "labs" / "reference_results").glob(f"{lab}-*.json"))) if "name" in r]


def _read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    found = []
    for path in paths:
        try:
            result = {"requests": 1, "alone": None, "quantity": None, **json.loads(path.read_text(encoding="utf-8"))}
        except (OSError, ValueError, TypeError, RecursionError):
            continue
        if _can_be_drawn(result):
            found.append(result)
    return found


def _can_be_drawn(result: dict[str, Any]) -> bool:
    """A file may have been carried here from anywhere, and the axis is logarithmic: a speed is a number above 0."""

    def is_speed(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e12

    texts = (result.get("what"), result.get("lab"), result["quantity"] or "")
    return (
        all(isinstance(text, str) for text in texts)
        and is_speed(result.get("tokens_per_second"))
        and is_speed(result["requests"])
        and (result["alone"] is None or is_speed(result["alone"]))
    )


def journey() -> None:
    """Draw the journey so far, on this machine: what one request gets from each lab's engine, and what all get together. All
    are tokens per second, but of different quantities, so each has a panel of its own."""
    results = read_results()
    if not results:
        print("No results yet: the journey begins with the first experiment you run.")
        return
    groups = _groups(results)
    rows = [len(marks) for marks in groups.values()]
    figure, _ = new_figure(height=0.6 + 0.55 * len(groups) + 0.3 * sum(rows))
    figure.clear()
    every = figure.subplots(len(groups), 1, sharex=True, squeeze=False, height_ratios=[n + 0.6 for n in rows])[:, 0]
    for axes, (title, marks), colour, marker in zip(every, groups.items(), cycle(COLORS), cycle("osD^"), strict=False):
        _draw(axes, title, marks, colour, marker)
    speeds = [speed for marks in groups.values() for _, speed in marks]
    _number_axis(every[-1], min(speeds), max(speeds))
    told = [f"{title}: " + "; ".join(f"{what}: {_number(s)}" for what, s in marks) for title, marks in groups.items()]
    show(figure, alt="Your journey so far, in tokens per second. " + ". ".join(told) + ".")
    if unlike := _unlike(results):
        print(unlike)


def _groups(results: list[dict[str, Any]]) -> dict[str, Marks]:
    """The marks by quantity; quantities without any are left out."""
    groups: dict[str, Marks] = {ONE: [], MANY: []}
    for result in results:
        quantity = result["quantity"] or (MANY if result["requests"] > 1 else ONE)
        groups.setdefault(quantity, []).append((f"Lab {result['lab']}: {result['what']}", result["tokens_per_second"]))
        if result["alone"]:
            groups[ONE].append((f"Lab {result['lab']}: one request alone", result["alone"]))
    return {quantity: marks for quantity, marks in groups.items() if marks}


_LEAST_WIDTH = 12  # right end / left end of the axis: three of 1, 2, 5 lie within, else matplotlib falls back to crowded ticks


def _number_axis(axes: Any, lowest: float, highest: float) -> None:
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    span = math.log10(highest / lowest)
    left, right = lowest / (1.25 + 0.1 * span), highest * 10 ** (0.3 + 0.15 * span)  # room for the numbers beside the marks
    wider = max(1.0, math.sqrt(_LEAST_WIDTH / (right / left)))
    axes.set_xlim(left / wider, right * wider)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if span < 1.8 else (1,)))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.set_xlabel("tokens/s on this machine (logarithmic)")


def _draw(axes: Any, title: str, marks: Marks, colour: str, marker: str) -> None:
    """Dots, not bars: on a logarithmic axis a bar's length means nothing."""
    style(axes)
    places = range(len(marks))
    axes.set_xscale("log")
    axes.plot([speed for _, speed in marks], places, marker, color=colour, markersize=8)
    for place, (_, speed) in zip(places, marks, strict=True):
        free = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # of the grid's line
        axes.annotate(_number(speed), (speed, place), xytext=(9, 0), textcoords="offset points", va="center", bbox=free)
    axes.set_yticks(places, [label for label, _ in marks])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(marks) - 0.5, -0.5)
    axes.spines["left"].set_visible(False)
    axes.set_title(title, loc="left", fontsize=10)


def _number(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def _unlike(results: list[dict[str, Any]]) -> str:
    """A line that says which marks were not measured like the others, if any."""
    keys = ("device", "dtype", "model", "shrunk")
    usual = {
        key: Counter(r[key] for r in results if key in r).most_common(1)[0][0] for key in keys if any(key in r for r in results)
    }
    told = []
    for result in results:
        other = [key for key, common in usual.items() if result.get(key, common) != common]
        words = [("a shrunk run" if result[key] else "in full") if key == "shrunk" else str(result[key]) for key in other]
        told += [f"Lab {result['lab']} ({', '.join(words)})"] if other else []
    return f"Not measured like the others: {'; '.join(told)}." if told else ""
