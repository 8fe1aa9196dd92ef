"""Figures are plain data: they are validated against plotly's schema here."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import plotly.graph_objects as go

from fedmq.runs import html_page
from fedmq.runs.html_page import Figure


def drawn(page: str) -> list[go.Figure]:
    """The figures of a page, validated against plotly's schema."""
    found = re.findall(r'<script type="application/json">(.*?)</script>', page, flags=re.DOTALL)
    return [go.Figure(**json.loads(each)) for each in found]


def titles(page: str) -> list[str]:
    """The titles of a page's figures."""
    return re.findall(r'<figure class="plot"[^>]*>\s*<h3>(.*?)</h3>', page)


def test_a_figure_is_valid_for_plotly_with_numbers_of_any_type() -> None:
    figure = Figure("a <title>", "merges", "fraction", 380, note="a & b")
    trace: dict[str, Any] = {"x": np.arange(3), "y": np.array([0.5, np.nan, 1.0]), "mode": "lines", "name": "one"}
    figure.draw("scatter", **trace)
    figure.draw("bar", x=["a", "</script><b>"], y=[1, None])
    figure.x["type"] = "log"
    element = figure.__html__()
    (made,) = drawn(element)
    assert (made.data[0].x, made.data[0].y) == ((0, 1, 2), (0.5, None, 1.0))
    assert (made.data[1].type, made.data[1].x, made.data[1].y) == ("bar", ("a", "</script><b>"), (1, None))
    assert (made.layout.xaxis.title.text, made.layout.yaxis.title.text) == ("merges", "fraction")
    assert (made.layout.height, made.layout.xaxis.type) == (380, "log")
    assert titles(element) == ["a &lt;title&gt;"]
    assert "a &amp; b" in element
    assert element.count("</script>") == 1, "no text ends the script it stands in"


def test_a_page_holds_plotly_once_and_escapes_all_text() -> None:
    figures = [Figure(f"figure {number}", "", "") for number in range(3)]
    page = html_page.document("<i>title", ["<b>note"], figures)
    assert len(drawn(page)) == 3
    assert page.count("plotly.js v") == 1
    assert "<i>title" not in page.replace("&lt;i&gt;title", "")
    assert "<b>note" not in page
    assert "http://" not in page.split("<script>")[0], "nothing is loaded from elsewhere"


def test_colours_repeat_after_the_palette() -> None:
    assert html_page.colour(0, 0.5) == html_page.colour(len(html_page.COLOURS), 0.5) == "rgba(0,114,178,0.5)"
