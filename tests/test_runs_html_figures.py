"""Figures are plain data: they are validated against plotly's schema here."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import plotly.graph_objects as go

from fedmq.runs.html_figures import Figure


def drawn(page: str) -> list[go.Figure]:
    """The figures of a page, validated against plotly's schema."""
    decoder, found = json.JSONDecoder(), []
    for match in re.finditer(r'Plotly\.newPlot\(\s*"[^"]+",\s*', page):
        data, end = decoder.raw_decode(page, match.end())
        layout, _ = decoder.raw_decode(page, page.index("{", end))
        found.append(go.Figure(data, layout))
    return found


def test_a_figure_is_valid_for_plotly_with_numbers_of_any_type() -> None:
    figure = Figure("a <title>", "merges", "fraction", 380)
    trace: dict[str, Any] = {"x": np.arange(3), "y": np.array([0.5, np.nan, 1.0]), "mode": "lines", "name": "one"}
    figure.draw("scatter", **trace)
    figure.draw("bar", x=["a", "b"], y=[1, None])
    figure.x["type"] = "log"
    first, second = figure.to_html(first=True), figure.to_html(first=False)
    assert len(first) > 10**6 > len(second), "the library is there once"
    (made,) = drawn(second)
    assert drawn(first) == [made]
    assert (made.data[0].x, made.data[0].y) == ((0, 1, 2), (0.5, None, 1.0))
    assert (made.data[1].type, made.data[1].y) == ("bar", (1, None))
    assert (made.layout.title.text, made.layout.xaxis.title.text, made.layout.yaxis.title.text) == (
        "a <title>",
        "merges",
        "fraction",
    )
    assert (made.layout.height, made.layout.xaxis.type) == (380, "log")
    assert made.layout.template.layout.plot_bgcolor == "white"
    assert "<title>" not in second, "no text ends the script it stands in"
