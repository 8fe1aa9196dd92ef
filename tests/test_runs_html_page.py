"""Figures are plain data: they are validated against plotly's schema here."""

from __future__ import annotations

import csv
import html
import io
import json
import re
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from fedmq.runs.report import html as pages
from fedmq.runs.report.html import Figure
from fedmq.text import as_csv, csv_text, printable


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
    assert (made.data[1].type, made.data[1].x, made.data[1].y) == ("bar", ("a", "&lt;/script>&lt;b>"), (1, None))
    assert (made.layout.xaxis.title.text, made.layout.yaxis.title.text) == ("merges", "fraction")
    assert (made.layout.height, made.layout.xaxis.type) == (380, "log")
    assert titles(element) == ["a &lt;title&gt;"]
    assert "a &amp; b" in element
    assert element.count("</script>") == 1, "no text ends the script it stands in"


def test_a_page_holds_plotly_once_and_escapes_all_text() -> None:
    figures = [Figure(f"figure {number}", "", "") for number in range(3)]
    page = pages.document("<i>title", ["<b>note"], figures)
    assert len(drawn(page)) == 3
    assert page.count("plotly.js v") == 1
    assert "<i>title" not in page.replace("&lt;i&gt;title", "")
    assert "<b>note" not in page
    assert "http://" not in page.split("<script>")[0], "nothing is loaded from elsewhere"


#: Texts that a browser or a terminal would not take for text.
HOSTILE = (
    '<a href="https://example.org">silo</a>',
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "\" onmouseover=alert(1) x='",
    "&lt;b>",
    "\u202etxt.exe\u2066",
    "\x1b]8;;https://example.org\x07silo\x1b]8;;\x07",
    "a\rb\x00c\x9b31m",
)


def test_text_of_any_origin_is_only_text_on_a_page_and_in_its_figures() -> None:
    for text in HOSTILE:
        figure = Figure(text, text, text, note=text)
        figure.draw("scatter", x=[1], y=[text], name=text, text=[text], hovertemplate="%{text}<br>here<extra></extra>")
        page = pages.document(text, [text], [figure])
        body = page.replace(get_plotlyjs(), "")
        assert all(each.isprintable() or each in "\n\t" for each in body)
        (made,) = drawn(page)
        (trace,) = made.data
        assert trace.hovertemplate == "%{text}<br>here<extra></extra>"
        for shown in (trace.name, trace.text[0], trace.y[0], made.layout.xaxis.title.text):
            assert "<" not in shown and html.unescape(shown) == printable(text)  # plotly.js shows it so
        assert body.count("</script>") == 3 and "<a " not in body and "<img" not in body
        assert "Content-Security-Policy" in body and "default-src 'none'" in body


def test_joined_emoji_and_scripts_with_joiners_stay_as_they_are() -> None:
    text = "\U0001f469\u200d\U0001f680 \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"
    assert text in pages.document("page", [text], [])


def test_no_text_of_a_table_is_a_formula_and_it_is_read_back() -> None:
    for text in ("=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\uff1d1", "a\nb"):
        table = as_csv([{"label": text, "r1": -0.5, "step": "-1e-3", "quoted": "'quoted'"}])
        (row,) = csv.DictReader(io.StringIO(table, newline=""))
        assert row["label"][0] not in "=+-@\t\r\uff1d" and csv_text(row["label"]) == printable(text)
        assert (row["r1"], row["step"], csv_text(row["quoted"])) == ("-0.5", "-1e-3", "'quoted'")
        assert table.count("\n") == 2
