"""scrub: step through a run with a slider, in a notebook of your own. No lab needs it.

    scrub(llm.trace)          as the last line of a cell; or display(scrub(llm.trace))

Three pictures of the same thing go into the one output, and the reader's front end takes the best that it can show: the widget
(JupyterLab with ipywidgets), a static figure (GitHub, a notebook that is only looked at, no ipywidgets), or the words.
"""

from __future__ import annotations

import base64
import contextlib
import io
from typing import Any

from minivllm.observe.captions import block_map_alt_text, step_alt_text, timeline_alt_text
from minivllm.observe.step_view import step_html
from minivllm.observe.timeline import new_figure, plot_block_map, plot_timeline, timeline_height
from minivllm.observe.trace import Trace

_DPI = 80  # a saved notebook carries the picture


def scrub(trace: Trace) -> Scrubber:
    """A slider over the steps of a trace: for each, who got how many tokens, the budget, the queues and the block map. Raises
    ValueError for a trace without steps."""
    return Scrubber(trace)


class Scrubber:
    """What `scrub` returns. It shows itself; `figure()` is the picture that stands in where widgets do not render."""

    def __init__(self, trace: Trace) -> None:
        if not trace.steps:
            raise ValueError("The trace has no steps yet: run something first, with LLM(trace=True).")
        self.trace = trace

    def __repr__(self) -> str:
        return f"{timeline_alt_text(self.trace)} {block_map_alt_text(self.trace)}"

    def html(self, place: int) -> str:
        """What the widget shows at step `place`."""
        return step_html(self.trace, place)

    def figure(self) -> Any:
        """Timeline and block map over the same steps, one above the other."""
        top = timeline_height(len(self.trace.requests))
        figure, (timeline, blocks) = new_figure(top + 3.6, ratios=(top, 3.6))
        plot_timeline(self.trace, timeline, x="step")
        plot_block_map(self.trace, blocks)
        return figure

    def widget(self) -> Any:
        """The widget alone. Raises ImportError without ipywidgets."""
        try:
            import ipywidgets
        except ImportError as error:
            raise ImportError("The scrubber needs ipywidgets: pip install 'minivllm[labs]'") from error
        last = len(self.trace.steps) - 1
        slider = ipywidgets.IntSlider(0, 0, last, description="step", layout={"width": "520px"})
        play = ipywidgets.Play(min=0, max=last, interval=400, description="play the run")
        words = ipywidgets.HTML()
        view = ipywidgets.HTML()

        def show(_: Any = None) -> None:
            view.value = step_html(self.trace, slider.value)
            words.value = f'<p role="status">{step_alt_text(self.trace, slider.value)}</p>'

        ipywidgets.jslink((play, "value"), (slider, "value"))
        slider.observe(show, names="value")
        show()
        return ipywidgets.VBox([ipywidgets.HBox([play, slider]), view, words])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        words = repr(self)
        bundle: dict[str, Any] = {"text/plain": words}
        metadata: dict[str, Any] = {}
        with contextlib.suppress(ImportError):  # no matplotlib: the words remain
            png = io.BytesIO()
            self.figure().savefig(png, format="png", dpi=_DPI)
            bundle["image/png"] = base64.b64encode(png.getvalue()).decode()
            metadata["image/png"] = {"alt": words}
        with contextlib.suppress(ImportError):  # no ipywidgets: the picture remains
            bundle |= {kind: data for kind, data in self.widget()._repr_mimebundle_().items() if kind not in bundle}
        return bundle, metadata
