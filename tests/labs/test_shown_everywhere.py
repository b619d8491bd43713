"""What is stored in a notebook is what GitHub, VS Code and a reader without a kernel show: text and pictures, nothing that
runs."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest

SOLUTIONS = sorted((Path(__file__).resolve().parents[2] / "solutions").glob("[0-9][0-9]_*.ipynb"))
SHOWN_ANYWHERE = {"text/plain", "text/html", "image/png"}


def displayed(notebook: Path) -> list[tuple[str, dict[str, Any]]]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [(cell["id"], output["data"]) for cell in cells for output in cell.get("outputs", []) if "data" in output]


@pytest.mark.parametrize("notebook", SOLUTIONS, ids=lambda p: p.stem)
def test_no_output_needs_a_widget_or_a_script(notebook: Path) -> None:
    for cell, data in displayed(notebook):
        assert set(data) <= SHOWN_ANYWHERE and "text/plain" in data, (cell, set(data))
        assert "<script" not in "".join(data.get("text/html", "")).lower(), cell


@pytest.mark.parametrize("notebook", SOLUTIONS, ids=lambda p: p.stem)
def test_a_picture_has_its_words_in_place_of_it_and_under_it(notebook: Path) -> None:
    shown = displayed(notebook)
    pictures = [i for i, (_, data) in enumerate(shown) if "image/png" in data]
    assert pictures, "a lab shows at least one figure"
    for i in pictures:
        cell, data = shown[i]
        words = "".join(data["text/plain"])
        assert len(words.split()) > 5, cell
        assert html.escape(words) in "".join(shown[i + 1][1].get("text/html", "")), cell
