"""Figures and pages for the browser: plain data that plotly.js draws, on self-contained HTML pages.

A page follows the reader's light or dark theme and the width of the window, and can be printed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import jinja2
from markupsafe import Markup

from fedmq.packages import package
from fedmq.text import printable_on_a_page

#: Templates and the style that all pages share.
TEMPLATES = Path(__file__).with_name("templates")
#: Significant digits of numbers in figures, more than a screen can show.
_DIGITS = 6
#: Maximum number of rounds for which each round has its own tick. With few rounds, plotly.js would also label halves of
#: rounds.
_MOST_TICKS = 12
#: Colours of traces, distinguishable on white and on black, and by most colour-blind readers (after Okabe and Ito).
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00",
    "#56B4E9", "#8C6BB1", "#7F7F7F", "#B2762A", "#3CA3A3",
)  # fmt: skip
#: The one attribute of a trace whose text has tags.
_TEMPLATE = "hovertemplate"


class Figure:
    """A figure as plain data for plotly.js. Plotly's figure class takes a tenth of a second to validate each one.

    Args:
        title: above the figure.
        x: title of the horizontal axis, with its unit.
        y: title of the vertical axis, with its unit.
        height: [pixels].
        note: a sentence below the figure: what it shows and how to read it.
    """

    def __init__(self, title: str, x: str, y: str, height: int = 380, note: str = "") -> None:
        self.title = title
        self.note = note
        self.height = height
        self.traces: list[dict[str, object]] = []
        self.x: dict[str, object] = {"title": {"text": x}}
        self.y: dict[str, object] = {"title": {"text": y}}
        self.layout: dict[str, object] = {"xaxis": self.x, "yaxis": self.y, "height": height}

    def draw(self, kind: str, **trace: Any) -> None:
        """Add a trace of a type of plotly.js, such as ``scatter``, with attributes: lists of numbers, text or None."""
        self.traces.append({"type": kind, **trace})
        if self.x["title"] == {"text": "round"}:
            rounds = [place for drawn in self.traces for place in cast("list[float]", drawn["x"])]
            self.x["dtick"] = 1 if max(rounds, default=0) <= _MOST_TICKS else None

    def choose(self, choices: Sequence[tuple[str, Sequence[object]]], method: str, *, right: bool = False) -> None:
        """Add a menu above the figure, at the left or the right edge, unless there is only one choice.

        A choice is a label and the arguments for plotly.js's method, ``restyle`` or ``update``; the first is as drawn.
        """
        if len(choices) > 1:
            side = {"x": 1, "xanchor": "right"} if right else {"x": 0, "xanchor": "left"}
            buttons = [{"label": label, "method": method, "args": list(args)} for label, args in choices]
            self.layout["updatemenus"] = [
                {"type": "dropdown", **side, "y": 1.02, "yanchor": "bottom", "buttons": buttons}
            ]
            self.layout["margin"] = {"t": 48}

    def plain(self) -> dict[str, object]:
        """The figure as JSON-serialisable data, with the keys ``data`` and ``layout`` of plotly.js."""
        return {"data": _plain(self.traces), "layout": _plain(self.layout)}

    def __html__(self) -> str:
        """The figure as an HTML element, which the page's script draws."""
        data = json.dumps(self.plain(), separators=(",", ":"))
        return (
            _environment()
            .get_template("figure.html.jinja")
            .render(
                # No text in the data may end the script element that holds it.
                figure=self,
                data=Markup(data.replace("<", "\\u003c")),  # noqa: S704
            )
        )


def _plain(value: object) -> Any:
    """Values for JSON: arrays as lists, numbers rounded to what can be seen, NaN and infinities as null.

    Text is escaped, as plotly.js would read tags in it, e.g. links; only hover templates have tags of ours.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    match value:
        case float():
            return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
        case Mapping():
            return {str(key): item if key == _TEMPLATE else _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case str():
            return printable_on_a_page(value).replace("&", "&amp;").replace("<", "&lt;")
        case _:
            return value


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=_shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )


def _shown(value: object) -> object:
    """A value of a template; text of any origin does not change the direction of what follows it."""
    return printable_on_a_page(value) if type(value) is str else value


@cache
def _plotly() -> str:
    script: str = package("plotly.offline", "report", "report.html").get_plotlyjs()  # a file of five megabytes
    return script


def render(template: str, **values: object) -> str:
    """A page from one of the templates; all text is escaped, figures are drawn."""
    script = Markup(_plotly())  # noqa: S704 - plotly's own file
    page = _environment().get_template(template).render(plotly=script, colours=COLOURS, **values)
    return page.encode("utf-8", "replace").decode("utf-8")  # run files may hold halves of surrogate pairs


def document(title: str, notes: Sequence[str], figures: Sequence[Figure], table: Sequence[Sequence[str]] = ()) -> str:
    """Figures on one self-contained HTML page, below a table whose first row is its head."""
    return render("figures.html.jinja", title=title, notes=notes, figures=figures, table=table)


def colour(place: int, opacity: float = 1.0) -> str:
    """A colour of :data:`COLOURS`, which repeat after ten."""
    name = COLOURS[place % len(COLOURS)]
    red, green, blue = (int(name[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
