"""The scrubber: a widget where widgets render, and in the same output a figure and words for everyone else."""

from __future__ import annotations

import base64
import sys
from html.parser import HTMLParser

import pytest

from minivllm.observe.step_view import step_html
from minivllm.observe.trace import Trace
from minivllm.observe.widgets import scrub
from tests.core.harness import make_request
from tests.observe.harness import recording_engine, run

WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def trace() -> Trace:
    engine = recording_engine(num_blocks=12, max_num_batched_tokens=16)
    prefix = list(range(100, 108))
    run(engine, make_request("<a>", [*prefix, 1], max_tokens=12))
    return run(engine, *(make_request(f"b{i}", [*prefix, *range(i, i + 9)], max_tokens=12) for i in range(3)))


class Balanced(HTMLParser):
    """Every tag that opens closes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_every_step_shows_who_got_what(trace: Trace):
    for place, step in enumerate(trace.steps):
        shown = Balanced(step_html(trace, place)).text
        assert f"Step {place}" in shown and f"Budget: {step.num_tokens} of 16 tokens" in shown
        for request_id, tokens in step.tokens.items():
            kind = "prefill" if tokens.is_prefill else "decode"
            assert request_id in shown and f"{kind} {tokens.num_tokens}" in shown
        assert ("preempted in this step" in shown) == bool(step.preempted)
        assert f"{step.num_free_blocks} of 11 free" in shown


def test_names_are_escaped(trace: Trace):
    assert "<a>" not in step_html(trace, 0) and "&lt;a&gt;" in step_html(trace, 0)


def test_a_large_pool_is_drawn_in_part():
    trace = run(recording_engine(2000), make_request("a", 5))
    shown = step_html(trace, 0)
    assert "1359 more blocks are not drawn" in shown and len(shown) < 200_000


def test_a_step_that_is_not_there_is_refused(trace: Trace):
    with pytest.raises(ValueError, match="Step 999 is not in the trace: it has steps 0 to"):
        step_html(trace, 999)
    with pytest.raises(ValueError, match="no steps yet"):
        scrub(Trace())


def test_widget_figure_and_words_are_one_output(trace: Trace):
    pytest.importorskip("ipywidgets")
    data, metadata = scrub(trace)._repr_mimebundle_()
    assert set(data) == {WIDGET, "image/png", "text/plain"}
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert metadata["image/png"]["alt"] == data["text/plain"] == repr(scrub(trace))
    assert len(data["image/png"]) < 300_000


def test_the_slider_moves_the_view(trace: Trace):
    ipywidgets = pytest.importorskip("ipywidgets")
    box = scrub(trace).widget()
    slider = box.children[0].children[1]
    assert isinstance(slider, ipywidgets.IntSlider) and slider.max == len(trace.steps) - 1
    slider.value = 3
    assert box.children[1].value == step_html(trace, 3)
    assert "Step 3 at" in box.children[2].value


def test_without_ipywidgets_the_figure_remains(trace: Trace, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    data, _ = scrub(trace)._repr_mimebundle_()
    assert set(data) == {"image/png", "text/plain"}
    with pytest.raises(ImportError, match="pip install 'minivllm"):
        scrub(trace).widget()


def test_without_matplotlib_the_words_remain(trace: Trace, monkeypatch: pytest.MonkeyPatch):
    for name in ("ipywidgets", "matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    data, _ = scrub(trace)._repr_mimebundle_()
    assert set(data) == {"text/plain"}
    with pytest.raises(ImportError, match="pip install 'minivllm"):
        scrub(trace).figure()
