"""Figures on HTML pages, rendered by plotly.js in the browser."""

from __future__ import annotations

import html
from collections.abc import Sequence
from functools import cache
from typing import Any


class Figure:
    """A figure as plain data for plotly.js. Plotly's figure class takes a tenth of a second to validate each one.

    Args:
        title: above the figure.
        x: title of the horizontal axis.
        y: title of the vertical axis.
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
            kind: type of the trace in plotly.js, such as ``scatter``.
            trace: attributes of the trace; lists or arrays of numbers, text or None.
        """
        self.traces.append({"type": kind, **trace})

    def to_html(self, *, first: bool) -> str:
        """The figure as an HTML element.

        Args:
            first: whether it is the first of its page, which includes plotly.js.
        """
        from plotly import io  # noqa: PLC0415 - takes a quarter of a second to import

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
    heading = f"<h1>{html.escape(title)}</h1><p>{html.escape('; '.join(notes))}</p>"
    return f"{head}<title>{html.escape(title)}</title>{style}{heading}{''.join(parts)}</html>"


def colour(place: int, opacity: float = 1.0) -> str:
    """A colour of plotly's default palette, which repeats after ten."""
    from plotly import colors  # noqa: PLC0415

    palette = colors.qualitative.Plotly
    red, green, blue = colors.hex_to_rgb(palette[place % len(palette)])
    return f"rgba({red},{green},{blue},{opacity})"
