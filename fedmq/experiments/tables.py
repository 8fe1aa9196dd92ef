"""Tables and plots of a comparison's rows: for the terminal, as CSV, LaTeX and Markdown, and on an HTML page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedmq.experiments.grid import ComparisonPlan, shown
from fedmq.experiments.summary import Row, Statistic
from fedmq.runs.report.html import Figure, colour, document
from fedmq.runs.results import made_otherwise
from fedmq.runs.run_records import RunSummary
from fedmq.text import is_float, printable

_DIFFERENCE = "difference"
_BORDERS = 3  # width of a column's borders on a terminal: a line and two spaces
_LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "±": "$\\pm$",
    "−": "$-$",
    "[": "{[}",  # after \\ a bracket would be an argument
}


@dataclass(frozen=True)
class Cell:
    """Text of a cell, and whether it is the best of its column."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Grid:
    """A table, independent of its output format."""

    head: tuple[str, ...]
    body: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...]


def _number(value: float, like: float, *, sign: bool = False) -> str:
    """Format a number with a precision that fits the magnitude of ``like``; a dash for NaN."""
    if math.isnan(value):
        return "-"
    form = ",.0f" if abs(like) >= 1000 else ".2f" if abs(like) >= 10 else ".4f"
    return format(value, ("+" if sign else "") + form).replace("-", "−")


def _mean(statistic: Statistic, seeds: int) -> str:
    """``0.2446 ± 0.0031``; with a count if some seeds have no value."""
    text = _number(statistic.mean, statistic.mean)
    if statistic.n > 1:
        text += f" ± {_number(statistic.std, statistic.mean)}"
    return text if statistic.n in (0, seeds) else f"{text} ({statistic.n} of {seeds} seeds)"


def difference_text(statistic: Statistic) -> str:
    """``+0.0123 [+0.0010, +0.0236]``; with a count if the baseline lacks some of the row's seeds."""
    values = (statistic.difference, statistic.low, statistic.high)
    middle, low, high = (_number(value, statistic.mean, sign=True) for value in values)
    text = middle if math.isnan(statistic.low) else f"{middle} [{low}, {high}]"
    return text if statistic.pairs in (0, statistic.n) else f"{text} ({statistic.pairs} of {statistic.n} seeds)"


def _setting(text: str, *, short: bool) -> str:
    """A selected setting as it would be typed; if short, with only the last part of its key."""
    key, _, value = text.partition("=")
    return f"{key.rpartition('.')[2] if short else key}={shown(json.loads(value))}"


def grid(rows: Sequence[Row], plan: ComparisonPlan) -> Grid:
    """Mean and standard deviation of every column, the difference to the baseline, and selected settings.

    The table has a line for each row. With ``plan.across``, rows that differ only in that key share a line, and its
    values are columns.
    """
    columns = list(rows[0].columns)
    compared = any(row.against for row in rows)
    selected = any(len(entry.candidates) > 1 for entry in plan.entries)
    across_values, lines = _lines(rows, plan.across)
    head = [""]
    for column in columns:
        for value in across_values:
            head += [_titled(column, value), _DIFFERENCE][: 1 + compared]
    if selected:
        head += [_titled(title, value) for value in across_values for title in ("chosen", "tried")]
    body = []
    for name, by_value in lines.items():
        cells = [Cell(name)]
        for column in columns:
            for value in across_values:
                cells += _cells(by_value.get(value), column, len(plan.seeds))[: 1 + compared]
        if selected:
            cells += [cell for value in across_values for cell in _chosen(by_value.get(value))]
        body.append(tuple(cells))
    return Grid(tuple(head), tuple(body), notes_of(rows, plan, selected, compared))


def _lines(rows: Sequence[Row], across: str | None) -> tuple[list[str | None], dict[str, dict[str | None, Row]]]:
    """The values of ``across`` (only None without it), and by name of a line its row for each value."""
    if across is None:
        return [None], {row.entry.name: {None: row} for row in rows}
    lines: dict[str, dict[str | None, Row]] = {}
    for row in rows:
        lines.setdefault(row.entry.name_but_for(across), {})[dict(row.entry.point).get(across)] = row
    return list(dict.fromkeys(value for by_value in lines.values() for value in by_value)), lines


def _titled(column: str, value: str | None) -> str:
    return column if value is None else f"{column}, {value}"


def _cells(row: Row | None, column: str, seeds: int) -> list[Cell]:
    """A row's mean in a column, and its difference; dashes without a row."""
    if row is None:
        return [Cell("-"), Cell("-")]
    statistic = row.columns[column]
    return [Cell(_mean(statistic, seeds), column in row.best), Cell(difference_text(statistic))]


def _chosen(row: Row | None) -> list[Cell]:
    """A row's selected settings, and the number of candidates."""
    count = len(row.entry.candidates) if row else 1
    settings = ", ".join(_setting(text, short=True) for text in row.chosen) if row else ""
    return [Cell(settings or "-"), Cell(str(count) if count > 1 else "-")]


def notes_of(rows: Sequence[Row], plan: ComparisonPlan, selected: bool, compared: bool) -> tuple[str, ...]:
    """Explanations for the reader of a table."""
    several = len(plan.seeds) > 1
    seeds = ", ".join(map(str, plan.seeds))
    notes = [f"side by side: the values of {plan.across}"] if plan.across else []
    notes += [f"mean ± sample standard deviation over seeds {seeds}" if several else f"seed {seeds}"]
    if compared:
        against = {row.against for row in rows if row.against}
        bases = dict.fromkeys(row.entry.method for row in rows if row.against is None)
        name = against.pop() if len(against) == 1 else f"{', '.join(bases)} at the same point"
        with_interval = ", with a 95 % t-interval over seeds" if several else ""
        notes.append(f"difference: paired by seed, to {name}{with_interval}")
    ours = (row.entry.method for row in rows if any(own.our_reading for own in _summaries(row)))
    read = dict.fromkeys(ours)
    if read:
        notes.append(f"our interpretation of details that the paper leaves open: {', '.join(read)}")
    public = {(row.entry.method, own.public_items) for row in rows for own in _summaries(row)}
    with_public = sorted(f"{method} ({items} items)" for method, items in public if items is not None)
    if with_public:
        notes.append(f"also trained on a public set, unlike the others: {', '.join(with_public)}")
    alone = [row.entry.name for row in rows if any(own.personal_only for own in _summaries(row))]
    if alone:
        notes.append(f"do not train the shared model as a whole, only personal.* applies: {', '.join(alone)}")
    diverged = [f"{row.entry.name} ({'; '.join(row.diverged)})" for row in rows if row.diverged]
    if diverged:
        notes.append(f"diverged, neither chosen nor averaged: {', '.join(diverged)}")
    if any(row.best for row in rows):
        notes.append("bold: better than every other row, by paired 95 % intervals")
    if selected:
        metric = plan.metrics[0]
        length = "" if plan.select_rounds is None else f", {plan.select_rounds} rounds"
        where = f"on the validation split, seed {plan.select_seed}{length}"
        notes.append(f"chosen: best of the candidates tried, by {metric} {where}")
        notes += measured_where_chosen(plan)
        if len(tried := {len(entry.candidates) for entry in plan.entries}) > 1:
            notes.append(f"budgets differ: between {min(tried)} and {max(tried)} candidates were tried")
    notes += _made_otherwise(rows)
    return tuple(notes)


def measured_where_chosen(plan: ComparisonPlan) -> list[str]:
    """A warning if the chosen candidates are evaluated on the split on which they were chosen."""
    if not plan.measured_on_validation:
        return []
    return [
        "evaluation.split is val, on which --select chooses, so figures of chosen candidates are too high; "
        "evaluation.split=test measures them on other items"
    ]


def _summaries(row: Row) -> list[RunSummary]:
    """Summaries of a row's runs; zero-shot runs have none."""
    return [own.summary for own in row.outcomes.values() if own.summary is not None]


def _made_otherwise(rows: Sequence[Row]) -> list[str]:
    """A warning if the runs were executed with different versions or hardware."""
    made = [own.versions_of for row in rows for own in _summaries(row)]
    several = [f"{name} {' and '.join(sorted(set(versions)))}" for name, versions in made_otherwise(made).items()]
    return (
        [f"made with different versions or hardware, so last digits may differ: {', '.join(several)}"]
        if several
        else []
    )


def terminal(table: Grid, title: str, width: int) -> list[Text | Table]:
    """Tables for the terminal: differences are below their means, and columns that do not fit go to a further table.

    Args:
        table: from :func:`grid`.
        title: above the first table; the notes are below the last. Both may be wider than a table.
        width: width of the terminal [characters].
    """
    below = {place for place, name in enumerate(table.head) if name == _DIFFERENCE}
    names, *places = (place for place in range(len(table.head)) if place not in below)
    # Numbers are not wrapped; long names and selected settings are.
    least = {
        place: min(width // 4, max(len(row[place].text) for row in table.body)) + _BORDERS for place in (names, *places)
    }
    blocks: list[list[int]] = [[]]
    for place in places:
        if blocks[-1] and 1 + sum(least[column] for column in (names, *blocks[-1], place)) > width:
            blocks.append([])
        blocks[-1].append(place)
    views = [Table() for _ in blocks]
    for view, block in zip(views, blocks, strict=True):
        view.add_column(table.head[names], overflow="fold")
        for place in block:
            view.add_column(table.head[place], justify="right", overflow="fold", min_width=least[place] - _BORDERS)
        for row in table.body:
            cells = [f"[bold]{escape(cell.text)}[/bold]" if cell.best else escape(cell.text) for cell in row]
            for place in below:
                if row[place].text != "-":
                    cells[place - 1] += f"\n[dim]{cells[place]}[/dim]"
            view.add_row(*(cells[place] for place in (names, *block)))
    return [Text(title, style="italic"), *views, Text("; ".join(table.notes), style="dim italic")]


def markdown(table: Grid, command: str) -> str:
    """The table in Markdown, after a code block with the command."""
    lines = [
        "| " + " | ".join(map(markdown_cell, table.head)) + " |",
        "|" + "---|" + "---:|" * (len(table.head) - 1),
        *(
            "| "
            + " | ".join(f"**{markdown_cell(cell.text)}**" if cell.best else markdown_cell(cell.text) for cell in row)
            + " |"
            for row in table.body
        ),
    ]
    before = "".join(f"    {line}\n" for line in command.splitlines())
    return f"{before}\n" + "\n".join(lines) + f"\n\n{markdown_text('; '.join(table.notes))}.\n"


def markdown_cell(text: str) -> str:
    """Escape a text for a cell of a Markdown table."""
    return markdown_text(text).replace("|", "\\|")


def markdown_text(text: str) -> str:
    """A text for Markdown on one line, in which a ``<`` begins no HTML."""
    return printable(" ".join(text.split())).replace("<", "&lt;")


def latex(table: Grid, command: str) -> str:
    """The table in LaTeX; needs the package booktabs."""

    def line(cells: Sequence[str]) -> str:
        return "  " + " & ".join(cells) + " \\\\"

    head = line([_latex(name) for name in table.head])
    body = [
        line([f"\\textbf{{{_latex(cell.text)}}}" if cell.best else _latex(cell.text) for cell in row])
        for row in table.body
    ]
    columns = "l" + "r" * (len(table.head) - 1)
    return "\n".join(
        [
            *(f"% {line}" for line in command.splitlines()),
            *(f"% {printable(note)}" for note in table.notes),
            f"\\begin{{tabular}}{{{columns}}}",
            "  \\toprule",
            head,
            "  \\midrule",
            *body,
            "  \\bottomrule",
            "\\end{tabular}",
            "",
        ]
    )


def _latex(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in printable(text))


def plain(rows: Sequence[Row]) -> list[dict[str, object]]:
    """The rows as plain data, one mapping each; unknown values are None."""
    return [
        {
            "name": row.entry.name,
            "method": row.entry.method,
            **dict(row.entry.point),
            "chosen": " ".join(_setting(text, short=False) for text in row.chosen),
            "tried": len(row.entry.candidates),
            "against": row.against,
            **{
                f"{column}.{part}": None if isinstance(value, float) and math.isnan(value) else value
                for column, statistic in row.columns.items()
                for part, value in vars(statistic).items()
            },
        }
        for row in rows
    ]


def runs(rows: Sequence[Row], plan: ComparisonPlan) -> list[dict[str, object]]:
    """Every run as plain data: its row, seed, values, model and folder; unknown values are None."""
    return [
        {
            "name": row.entry.name,
            "seed": seed,
            **{metric: outcome.value(metric) if outcome.shows(metric) else None for metric in plan.metrics},
            **{target.title: outcome.time_to(target) for target in plan.targets},
            "model_digest": None if outcome.summary is None else outcome.summary.model_digest,
            "folder": str(outcome.folder.root),
        }
        for row in rows
        for seed, outcome in row.outcomes.items()
    ]


# ------------------------------------------------------------------------------------------------------------- plots
F64 = npt.NDArray[np.float64]
#: Ratio of the largest to the smallest value from which an axis is logarithmic.
_LOGARITHMIC_FROM = 50.0


def page(rows: Sequence[Row], title: str, command: str, table: Grid) -> str:
    """Table, differences to the baseline, curves over merges and virtual time, each column against the varied value."""
    runs = [outcome for row in rows for outcome in row.outcomes.values()]
    columns = [column for column in rows[0].columns if any(run.shows(column) for run in runs)]
    body = [[Markup("<b>{}</b>").format(cell.text) if cell.best else cell.text for cell in row] for row in table.body]
    figures = [each for column in columns for each in _column(rows, column)]
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
    names = [row.entry.name for row, _ in known] or [row.entry.name for row in rows]
    height = 26 * len(names) + 120
    if known:
        bases = ", ".join(dict.fromkeys(row.against for row, _ in known if row.against))
        note = "Mean paired difference over common seeds, with its 95 % t-interval; one that covers 0 is no evidence."
        figure = Figure(f"{column}: difference to {bases}", f"difference of {column}", "", height, note)
        figure.draw(
            "scatter",
            mode="markers",
            x=[each.difference for _, each in known],
            y=names,
            marker={"size": 9},
            error_x={"array": [each.high - each.difference for _, each in known]},
            showlegend=False,
        )
        figure.layout["shapes"] = [
            {
                "type": "line",
                "x0": 0,
                "x1": 0,
                "yref": "paper",
                "y0": 0,
                "y1": 1,
                "line": {"color": "#9aa7b4", "width": 2},
            }
        ]
    else:
        note = "A dot for each run. Differences with intervals need a baseline and two seeds."
        figure = Figure(f"{column} of each run", column, "", height, note)
        runs = [(row.entry.name, run.value(column)) for row in rows for run in row.outcomes.values()]
        figure.draw("scatter", mode="markers", x=[value for _, value in runs], y=[name for name, _ in runs])
    figure.y |= {"type": "category", "categoryorder": "array", "categoryarray": names[::-1], "dtick": 1}
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
