"""Figures on HTML pages, drawn by plotly in the reader's browser."""

from __future__ import annotations

import html
from collections.abc import Sequence
from functools import cache
from typing import Any


class Figure:
    """A figure as plotly.js takes it: plain data. Plotly's own figure checks every key against its schema, a template's
    thousands too, which takes a tenth of a second for each.

    Args:
        title: above it.
        x: name of the horizontal axis.
        y: name of the vertical axis.
        height: [pixels].
    """

    def __init__(self, title: str, x: str, y: str, height: int = 420) -> None:
        self.traces: list[dict[str, object]] = []
        self.x: dict[str, object] = {"title": {"text": x}}
        self._layout = {
            "title": {"text": title},
            "xaxis": self.x,
            "yaxis": {"title": {"text": y}},
            "height": height,
            "margin": {"t": 50},
        }

    def draw(self, kind: str, **trace: Any) -> None:
        """Add a trace.

        Args:
            kind: plotly.js's type of it, as scatter.
            trace: its attributes; lists or arrays of numbers, text or None.
        """
        self.traces.append({"type": kind, **trace})

    def to_html(self, *, first: bool) -> str:
        """The figure as an element of a page.

        Args:
            first: of its page, which brings the library that draws all of them.
        """
        from plotly import io  # noqa: PLC0415 - a quarter of a second that only a page needs

        drawn = {"data": self.traces, "layout": {**self._layout, "template": _template()}}
        return str(io.to_html(drawn, full_html=False, include_plotlyjs=first, validate=False))


@cache
def _template() -> dict[str, object]:
    from plotly import io  # noqa: PLC0415

    white: dict[str, object] = io.templates["plotly_white"].to_plotly_json()
    return white


def document(title: str, notes: Sequence[str], figures: Sequence[Figure]) -> str:
    """Figures on one self-contained HTML page."""
    parts = [figure.to_html(first=place == 0) for place, figure in enumerate(figures)]
    head = "<!doctype html><html lang='en'><meta charset='utf-8'>"
    style = "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem}</style>"
    words = f"<h1>{html.escape(title)}</h1><p>{html.escape('; '.join(notes))}</p>"
    return f"{head}<title>{html.escape(title)}</title>{style}{words}{''.join(parts)}</html>"


def colour(place: int, opacity: float = 1.0) -> str:
    """A colour of plotly's usual ten, over and over."""
    from plotly import colors  # noqa: PLC0415

    palette = colors.qualitative.Plotly
    red, green, blue = colors.hex_to_rgb(palette[place % len(palette)])
    return f"rgba({red},{green},{blue},{opacity})"
