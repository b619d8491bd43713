"""Figures: drawn from the data, on the axes given, with every kind of thing named, and said in words."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

matplotlib = pytest.importorskip("matplotlib")

from matplotlib.figure import Figure  # noqa: E402

from minivllm.observe.timeline import alt_text, plot_block_map, plot_budget, plot_itl, plot_timeline  # noqa: E402
from minivllm.observe.trace import Trace  # noqa: E402
from tests.core.harness import make_request  # noqa: E402
from tests.observe.harness import recording_engine, run  # noqa: E402

PLOTS = [plot_timeline, plot_budget, plot_block_map, plot_itl]


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Chunks, a shared prefix, preemptions, an abort."""
    engine = recording_engine(num_blocks=12, max_num_batched_tokens=16)
    prefix = list(range(100, 108))
    engine.add_request(make_request("gone", 3, max_tokens=9))
    engine.step()
    engine.abort_requests(["gone"])
    run(engine, make_request("a", [*prefix, 1], max_tokens=12))
    return run(engine, *(make_request(f"b{i}", [*prefix, *range(i, i + 9)], max_tokens=12) for i in range(3)))


def legend_of(ax: Any) -> set[str]:
    return {text.get_text() for text in ax.get_legend().get_texts()}


def draw(ax: Any) -> None:
    ax.figure.canvas.draw()


@pytest.mark.parametrize("plot", PLOTS)
def test_a_figure_of_its_own_or_the_axes_given(plot: Callable[..., Any], trace: Trace):
    draw(plot(trace))
    ax = Figure().subplots()
    assert plot(trace, ax) is ax


@pytest.mark.parametrize("plot", PLOTS)
def test_an_empty_trace_is_an_empty_figure(plot: Callable[..., Any]):
    draw(plot(Trace()))
    assert alt_text(plot, Trace())


def test_the_timeline_tells_every_kind_apart(trace: Trace):
    ax = plot_timeline(trace)
    assert {"waiting", "prefill", "decode", "preempted, waiting again", "preempted", "prefix found in cache", "end",
            "aborted or failed"} <= legend_of(ax)  # fmt: skip
    assert [label.get_text() for label in ax.get_yticklabels()] == list(trace.requests)
    looks = {(patch.get_facecolor(), patch.get_hatch(), round(patch.get_height(), 2)) for patch in ax.patches}
    assert len({look[1:] for look in looks}) >= 3  # not by colour alone


def test_time_or_steps_are_on_the_axis(trace: Trace):
    assert plot_timeline(trace).get_xlabel() == "time (s)"
    assert plot_timeline(trace, x="step").get_xlim() == (0, len(trace.steps))
    assert plot_budget(trace, x="time").get_xlabel() == "time (s)"
    for plot in (plot_timeline, plot_budget, plot_block_map):
        with pytest.raises(ValueError, match="x must be"):
            plot(trace, x="blocks")
    with pytest.raises(ValueError, match="one column a step"):
        plot_block_map(trace, x="time")


def test_bars_of_the_budget_add_up_to_the_steps(trace: Trace):
    ax = plot_budget(trace)
    assert sum(patch.get_height() for patch in ax.patches) == sum(step.num_tokens for step in trace.steps)
    assert {"decode", "prefill", "preemption", "budget: 16"} <= legend_of(ax)


def test_a_budget_far_above_the_bars_leaves_them_their_room():
    trace = run(recording_engine(max_num_batched_tokens=1000), make_request("a", 5))
    ax = plot_budget(trace)
    assert ax.get_ylim()[1] < 10 and "budget: 1000, far above" in legend_of(ax)


def test_drafts_are_a_part_of_the_bar():
    trace = run(recording_engine(echo={"num_speculative_tokens": 2}), make_request("a", 5, max_tokens=9))
    assert "drafts to verify" in legend_of(plot_budget(trace))


def test_the_block_map_has_a_column_a_step(trace: Trace):
    ax = plot_block_map(trace)
    pixels = ax.images[0].get_array()
    assert pixels.shape == (11, len(trace.steps), 3)
    assert {"free", "shared by several", "cached block evicted", "preemption"} <= legend_of(ax)


def test_every_token_has_its_latency(trace: Trace):
    ax = plot_itl(trace)
    drawn = sum(len(points.get_offsets()) for points in ax.collections)
    assert drawn == sum(r.num_output_tokens for r in trace.requests.values())
    assert {"TTFT", "ITL, all decode", "ITL, a prefill in the step", "ITL, preempted before it"} <= legend_of(ax)


def test_more_requests_than_names_fit():
    trace = run(recording_engine(200), *(make_request(f"r{i}", 3, max_tokens=3) for i in range(60)))
    ax = plot_timeline(trace)
    assert len(ax.get_yticks()) <= 24
    draw(ax)
    draw(plot_block_map(trace))


def test_the_words_have_the_numbers(trace: Trace):
    gave_way = [name for step in trace.steps for name in step.preempted]
    said = alt_text(plot_timeline, trace)
    assert f"{len(trace.requests)} requests" in said and f"Preempted: {gave_way[0]} in step" in said
    assert "Request gone (3 prompt tokens) arrives at 0 ms" in said and "ends with abort" in said
    assert "8 of them cached" in said
    assert "of a budget of 16" in alt_text(plot_budget, trace)
    assert "of 11 (" in alt_text(plot_block_map, trace)
    assert "First tokens: median" in alt_text(plot_itl, trace)
    with pytest.raises(ValueError, match="plot_timeline, plot_budget"):
        alt_text(print, trace)


def test_figures_need_no_pyplot_and_no_display():
    code = """
import sys
from tests.core.harness import make_request
from tests.observe.harness import recording_engine, run
from minivllm.observe.timeline import plot_timeline
plot_timeline(run(recording_engine(), make_request("a", 5))).figure.canvas.draw()
assert "matplotlib.pyplot" not in sys.modules and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
