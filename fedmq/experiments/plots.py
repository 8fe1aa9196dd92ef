"""Plots of a comparison's rows, on one self-contained HTML page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from fedmq.experiments.summary import Row
from fedmq.experiments.tables import Grid
from fedmq.runs.report.html import Figure, colour, document
from fedmq.text import is_float

F64 = npt.NDArray[np.float64]
#: Ratio of the largest to the smallest value from which an axis is logarithmic.
_LOGARITHMIC_FROM = 50.0
#: Columns with the epsilon of a run with noise, of silos and of single items.
EPSILON = "privacy.epsilon"
EPSILONS = (EPSILON, f"item_{EPSILON}")


def page(rows: Sequence[Row], title: str, command: str, table: Grid) -> str:
    """Table, differences to the baseline, curves over merges and virtual time, each column against the varied value."""
    runs = [outcome for row in rows for outcome in row.outcomes.values()]
    columns = [column for column in rows[0].columns if any(run.shows(column) for run in runs)]
    body = [[Markup("<b>{}</b>").format(cell.text) if cell.best else cell.text for cell in row] for row in table.body]
    figures = [each for column in columns for each in _column(rows, column)]
    for epsilon in EPSILONS:
        if epsilon in columns:
            figures = [*(_against_epsilon(rows, each, epsilon) for each in columns if each not in EPSILONS), *figures]
    return document(title, (f"Made by: {command}", *table.notes), figures, [table.head, *body])


def _column(rows: Sequence[Row], column: str) -> list[Figure]:
    """The figures of one column."""
    figures = [_against_value(rows, column)] if _shared_keys(rows) else []
    figures.insert(0, _dots(rows, column))
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


def _dots(rows: Sequence[Row], column: str) -> Figure:
    """Paired differences to the baseline with their intervals and a zero line; without intervals, each run's value."""
    found = [(row, row.columns[column]) for row in rows]
    known = [(row, each) for row, each in found if math.isfinite(each.high - each.low)]
    if known:
        bases = ", ".join(dict.fromkeys(row.against for row, _ in known if row.against))
        note = "Mean paired difference over common seeds, with its 95 % t-interval; one that covers 0 is no evidence."
        names, middles = [row.entry.name for row, _ in known], [each.difference for _, each in known]
        errors = [each.high - each.difference for _, each in known]
        title = f"{column}: difference to {bases}"
        return differences(title, f"difference of {column}", names, middles, errors, note)
    note = "A dot for each run. Differences with intervals need a baseline and two seeds."
    figure = _by_name(f"{column} of each run", column, [row.entry.name for row in rows], note)
    runs = [(row.entry.name, run.value(column)) for row in rows for run in row.outcomes.values()]
    figure.draw("scatter", mode="markers", x=[value for _, value in runs], y=[name for name, _ in runs])
    return figure


def differences(
    title: str, x: str, names: Sequence[str], middles: Sequence[float], errors: Sequence[float] | None, note: str
) -> Figure:
    """A dot for each name, from top to bottom, with half of its interval if ``errors`` are given, and a zero line."""
    figure = _by_name(title, x, names, note)
    bars = {} if errors is None else {"error_x": {"array": list(errors)}}
    dots = {"x": list(middles), "y": list(names), "marker": {"size": 9}, **bars}
    figure.draw("scatter", mode="markers", showlegend=False, **dots)
    line = {"color": "#9aa7b4", "width": 2}
    figure.layout["shapes"] = [{"type": "line", "x0": 0, "x1": 0, "yref": "paper", "y0": 0, "y1": 1, "line": line}]
    return figure


def _by_name(title: str, x: str, names: Sequence[str], note: str) -> Figure:
    """An empty figure with a line for each name, the first one at the top."""
    figure = Figure(title, x, "", 26 * len(names) + 120, note)
    figure.y |= {"type": "category", "categoryorder": "array", "categoryarray": list(names)[::-1], "dtick": 1}
    figure.y["range"] = [-0.5, len(names) - 0.5]
    return figure


def _curves(rows: Sequence[Row], metric: str, *, over_time: bool) -> Figure:
    over, unit = ("virtual time", "virtual time [s]") if over_time else ("merges", "merges")
    figure = Figure(f"{metric} over {over}", unit, metric)
    for place, row in enumerate(rows):
        courses = [np.array(outcome.course(metric), float).reshape(-1, 3).T for outcome in row.outcomes.values()]
        curves = [(now if over_time else version, y) for version, now, y in courses if len(y) > 1]
        if curves:
            x, values = on_common_grid(curves)
            std = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(x))
            _line(figure, place, row.entry.name, x.tolist(), values.mean(axis=0), std)
    return figure


def on_common_grid(curves: Sequence[tuple[F64, F64]]) -> tuple[F64, F64]:
    """Interpolate several curves linearly at common places, from where all of them have begun.

    A run that has ended keeps its last value, so that the mean ends at the value of the tables.
    """
    first = max(x[0] for x, _ in curves)
    grid = np.unique(np.concatenate([x[first <= x] for x, _ in curves]))
    return grid, np.stack([np.interp(grid, x, y) for x, y in curves])


def _against_epsilon(rows: Sequence[Row], column: str, epsilon: str) -> Figure:
    """A column against epsilon: one line for each method, through its rows with noise."""
    note = "Noise is stronger to the left. Rows without noise have no epsilon and are not shown."
    figure, lines = Figure(f"{column} against epsilon", "epsilon", column, note=note), dict[str, list[Row]]()
    figure.x["type"] = "log"
    for row in sorted(rows, key=lambda row: row.columns[epsilon].mean):
        if math.isfinite(row.columns[epsilon].mean):
            lines.setdefault(row.entry.method, []).append(row)
    for place, (name, members) in enumerate(lines.items()):
        mean, std = (np.array([getattr(row.columns[column], part) for row in members]) for part in ("mean", "std"))
        _line(figure, place, name, [row.columns[epsilon].mean for row in members], mean, std)
    return figure


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
