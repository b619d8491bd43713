"""Figures with alternative text. A plot is a picture for some readers and a sentence for the others, so `alt` is not
optional."""

from __future__ import annotations

import base64
import html
import io
from typing import TYPE_CHECKING, Any

from checks.student.failure import CheckFailed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Eight colours that differ in lightness too (Okabe and Ito), for readers who do not tell red from green.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")


def show(figure: Figure, alt: str) -> None:
    """Display a matplotlib figure; `alt` says what it shows, with its numbers. It is the picture's alternative text, and under
    the picture it can be unfolded: JupyterLab reads an alternative text to nobody. Where pictures do not render, `alt` stands
    there."""
    _display(figure, alt, None)


class live:
    """A picture that is drawn again in place: `picture = live(); picture.update(figure, alt)`."""

    def __init__(self) -> None:
        self._handles: list[Any] | None = None

    def update(self, figure: Figure, alt: str) -> None:
        self._handles = _display(figure, alt, self._handles, keep=True)


def new_figure(width: float = 7.0, height: float = 3.2, columns: int = 1) -> tuple[Figure, Any]:
    """A figure and its axes (a list of them if there are several columns) in the labs' style. Not pyplot's, so that nothing is
    displayed by itself or kept alive."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # The pads are inches around everything: no title touches the edge.
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08))
    every = figure.subplots(1, columns, squeeze=False)[0]
    for axes in every:
        style(axes)
    return figure, every[0] if columns == 1 else list(every)


def style(axes: Axes) -> None:
    """The labs' style, for axes that new_figure did not make."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_prop_cycle(color=COLORS)


def _display(figure: Figure, alt: str, handles: list[Any] | None, keep: bool = False) -> list[Any] | None:
    """Show picture and words, or show them anew in the places of `handles`. With `keep`, returns the handles."""
    from IPython.display import DisplayHandle, display

    if not alt or not alt.strip():
        raise CheckFailed("A figure needs alt=..., a sentence that says what it shows.")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    picture = {"image/png": base64.b64encode(buffer.getvalue()).decode(), "text/plain": alt}
    words = {"text/html": f"<details><summary>In words</summary>{html.escape(alt)}</details>", "text/plain": ""}
    shown: list[tuple[dict[str, str], dict[str, Any]]] = [(picture, {"image/png": {"alt": alt}}), (words, {})]
    if handles is None and not keep:
        for bundle, metadata in shown:
            display(bundle, raw=True, metadata=metadata)  # type: ignore[no-untyped-call]
        return None
    if handles is not None:
        for handle, (bundle, metadata) in zip(handles, shown, strict=True):
            handle.update(bundle, raw=True, metadata=metadata)
        return handles
    handles = [DisplayHandle(), DisplayHandle()]  # type: ignore[no-untyped-call]
    for handle, (bundle, metadata) in zip(handles, shown, strict=True):
        handle.display(bundle, raw=True, metadata=metadata)
    return handles
