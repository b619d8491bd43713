"""What experiments measured, one small file a lab, and the journey drawn from them."""

from __future__ import annotations

import json
from typing import Any

from checks.student.figures import COLORS, new_figure, show
from checks.student.home import results_dir, write_atomically


def save_result(lab: str, tokens_per_second: float, what: str, data: dict[str, Any]) -> None:
    """Keep an experiment in results/NN.json. `what` says in a few words what ran at `tokens_per_second`, the lab's mark on the
    journey; `data` is whatever the plot was drawn from (numbers, lists, strings)."""
    result = {"lab": lab, "tokens_per_second": tokens_per_second, "what": what, **data}
    write_atomically(results_dir() / f"{lab}.json", json.dumps(result, indent=1) + "\n")


def read_results() -> list[dict[str, Any]]:
    """The saved results, by lab. A file that cannot be read is left out."""
    found = []
    for path in sorted(results_dir().glob("[0-9][0-9].json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(result["tokens_per_second"], (int, float)) and isinstance(result["what"], str):
                found.append(result)
        except (ValueError, KeyError, TypeError):
            continue
    return found


def journey() -> None:
    """Draw the journey so far: tokens per second of each lab's engine, on this machine."""
    results = read_results()
    if not results:
        print("No results yet: the journey begins with the first experiment you run.")
        return
    figure, axes = new_figure(height=0.9 + 0.45 * len(results))
    labels = [f"Lab {r['lab']}: {r['what']}" for r in results]
    speeds = [r["tokens_per_second"] for r in results]
    bars = axes.barh(labels, speeds, color=COLORS[0])
    axes.bar_label(bars, labels=[f" {s:.3g} tokens/s" for s in speeds])
    axes.invert_yaxis()
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks([])
    axes.set_xlim(0, max(speeds) * 1.35)
    axes.set_title("Your journey so far, on this machine", loc="left")
    show(
        figure,
        alt="Your journey so far. "
        + "; ".join(f"{label}: {s:.3g} tokens per second" for label, s in zip(labels, speeds, strict=True)),
    )
