"""Plots of a comparison's rows, on one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmq.experiments.summary import Row
from fedmq.runs.report.html import Figure, colour, document
from fedmq.runs.results import FinishedRun
from fedmq.text import is_float

F64 = npt.NDArray[np.float64]
#: Ratio of the largest to the smallest value from which an axis is logarithmic.
_LOGARITHMIC_FROM = 50.0


def page(rows: Sequence[Row], title: str, notes: Sequence[str]) -> str:
    """Bars, curves over merges and over virtual time, and each column against the varied value if there is one.

    Args:
        rows: rows of a comparison; at least one.
        title: title of the page.
        notes: shown below it.
    """
    runs = [outcome for row in rows for outcome in row.outcomes.values()]
    columns = [column for column in rows[0].columns if any(run.shows(column) for run in runs)]
    return document(title, notes, [figure for column in columns for figure in _column(rows, column)])


def _column(rows: Sequence[Row], column: str) -> list[Figure]:
    """The figures of one column."""
    figures = [_against_value(rows, column)] if _shared_keys(rows) else []
    figures.append(_bars(rows, column))
    if any(len(outcome.course(column)) > 1 for row in rows for outcome in row.outcomes.values()):
        figures += [_curves(rows, column, over_time=False), _curves(rows, column, over_time=True)]
    return figures


def _line(figure: Figure, place: int, name: str, x: Sequence[Any], mean: F64, std: F64) -> None:
    """Draw a line with a band of one sample standard deviation on both sides."""
    std = np.nan_to_num(std)
    if std.any():
        band = [*(mean + std), *(mean - std)[::-1]]
        figure.draw(
            "scatter",
            x=[*x, *reversed(x)],
            y=band,
            mode="lines",  # plotly adds markers to short lines, which would look like points of another row
            fill="toself",
            fillcolor=colour(place, 0.15),
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
            legendgroup=name,
        )
    figure.draw(
        "scatter", x=list(x), y=mean, name=name, legendgroup=name, mode="lines+markers", line={"color": colour(place)}
    )


def _bars(rows: Sequence[Row], column: str) -> Figure:
    figure = Figure(column, "", column)
    figure.draw(
        "bar",
        x=[row.entry.name for row in rows],
        y=[row.columns[column].mean for row in rows],
        error_y={"type": "data", "array": [row.columns[column].std for row in rows]},
        marker={"color": [colour(place) for place in range(len(rows))]},
    )
    return figure


def _curves(rows: Sequence[Row], metric: str, *, over_time: bool) -> Figure:
    over, unit = ("virtual time", "virtual time [s]") if over_time else ("merges", "merges")
    figure = Figure(f"{metric} over {over}", unit, metric)
    for place, row in enumerate(rows):
        courses = [_curve(outcome, metric, over_time=over_time) for outcome in row.outcomes.values()]
        curves = [(x, y) for x, y in courses if len(x) > 1]
        if curves:
            x, values = on_common_grid(curves)
            std = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(x))
            _line(figure, place, row.entry.name, x.tolist(), values.mean(axis=0), std)
    return figure


def _curve(outcome: FinishedRun, metric: str, *, over_time: bool) -> tuple[F64, F64]:
    course = outcome.course(metric)
    return (
        np.array([now if over_time else version for version, now, _ in course], float),
        np.array([value for _, _, value in course], float),
    )


def on_common_grid(curves: Sequence[tuple[F64, F64]]) -> tuple[F64, F64]:
    """Interpolate several curves linearly at common places, on the range that all of them cover.

    Args:
        curves: (x, y), each float64 [n] with its own n; x increasing.

    Returns:
        x [m] and the values [curves, m]; m is 0 if there is no common range.
    """
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.unique(np.concatenate([x[(first <= x) & (x <= last)] for x, _ in curves]))
    return grid, np.stack([np.interp(grid, x, y) for x, y in curves])


def _shared_keys(rows: Sequence[Row]) -> list[str]:
    """The varied keys that all rows with a point have in common; methods may vary different keys."""
    points = [dict(row.entry.point) for row in rows if row.entry.point]
    return [key for key in (points[0] if points else ()) if all(key in point for point in points)]


def _against_value(rows: Sequence[Row], column: str) -> Figure:
    """A column against the first shared key with numeric values, one line per combination of the other keys."""
    rows = [row for row in rows if row.entry.point]
    points = {row.entry.name: dict(row.entry.point) for row in rows}
    keys = _shared_keys(rows)
    numeric = [key for key in keys if all(is_float(point[key]) for point in points.values())]
    key = (numeric or keys)[0]
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(row.entry.name_but_for(key), []).append(row)
    figure = Figure(f"{column} against {key}", key, column)
    if numeric:
        least, most = (edge(float(point[key]) for point in points.values()) for edge in (min, max))
        if least > 0 and most / least >= _LOGARITHMIC_FROM:
            figure.x["type"] = "log"
        lines = {
            name: sorted(members, key=lambda row: float(points[row.entry.name][key])) for name, members in lines.items()
        }
    for place, (name, members) in enumerate(lines.items()):
        x = [float(points[row.entry.name][key]) if numeric else points[row.entry.name][key] for row in members]
        mean, std = (np.array([getattr(row.columns[column], part) for row in members]) for part in ("mean", "std"))
        _line(figure, place, name, x, mean, std)
    return figure
