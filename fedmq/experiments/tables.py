"""Tables of a comparison's rows: for the terminal, and as CSV, LaTeX and Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedmq.experiments.grid import ComparisonPlan, at_edge, shown
from fedmq.experiments.summary import ENOUGH_SEEDS, LEVEL, YARDSTICKS, Row, Statistic, yardstick_row
from fedmq.runs.results import about_silos, made_otherwise
from fedmq.runs.run_records import RunSummary
from fedmq.text import counted, enumerated, printable

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


def number(value: float, like: float, *, sign: bool = False) -> str:
    """Format a number with a precision that fits the magnitude of ``like``; a dash for NaN."""
    if math.isnan(value):
        return "-"
    form = ",.0f" if abs(like) >= 1000 else ".2f" if abs(like) >= 10 else ".4f"
    return format(value, ("+" if sign else "") + form).replace("-", "−")


def _mean(statistic: Statistic, seeds: int) -> str:
    """``0.2446 ± 0.0031``; with a count if some seeds have no value."""
    text = number(statistic.mean, statistic.mean)
    if statistic.n > 1:
        text += f" ± {number(statistic.std, statistic.mean)}"
    return text if statistic.n in (0, seeds) else f"{text} ({statistic.n} of {seeds} seeds)"


def difference_text(statistic: Statistic) -> str:
    """A difference with its interval: ``+0.0123 [+0.0010, +0.0236]*``.

    A star marks a difference that is significant with Holm's correction. If the baseline lacks some of the row's seeds,
    their number follows.
    """
    values = (statistic.difference, statistic.low, statistic.high)
    middle, low, high = (number(value, statistic.mean, sign=True) for value in values)
    text = middle if math.isnan(statistic.low) else f"{middle} [{low}, {high}]{'*' * (statistic.holm < LEVEL)}"
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


def _claims(rows: Sequence[Row]) -> list[str]:
    """A note on what a star means, and a warning if differences are claimed from few seeds."""
    compared = [row.columns for row in rows if row.against]
    tested = [sum(not math.isnan(each[name].p) for each in compared) for name in rows[0].columns]
    family = max(tested, default=0)
    if not family:
        return []
    notes = [
        f"*: significant at the {LEVEL:.0%} level, paired t-test with Holm's correction for {counted(family, 'row')}"
    ]
    claimed = [row.columns[name].n for row in rows for name in row.best]
    claimed += [each.pairs for columns in compared for each in columns.values() if each.holm < LEVEL]
    if min(claimed, default=ENOUGH_SEEDS) < ENOUGH_SEEDS:
        notes.append(f"differences are claimed from {min(claimed)} seeds: at least {ENOUGH_SEEDS} are needed")
    return notes


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
    if plan.same_mask:
        notes.append(
            "the same silos lack a modality with every seed, so intervals do not cover that choice: set "
            "missing_modality.seed=null"
        )
    if compared:
        against = {row.against for row in rows if row.against}
        bases = dict.fromkeys(row.entry.method for row in rows if row.against is None)
        name = against.pop() if len(against) == 1 else f"{', '.join(bases)} at the same point"
        with_interval = ", with a 95 % t-interval over seeds" if several else ""
        notes.append(f"difference: paired by seed, to {name}{with_interval}")
        notes += _claims(rows)
    notes += [f"{yardstick_row(kind)}: {YARDSTICKS[kind]}" for kind in plan.yardstick]
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
        over = "mean over seeds" if len(plan.select_seeds) > 1 else "seed"
        where = f"on the validation split, {over} {', '.join(map(str, plan.select_seeds))}{length}"
        notes.append(f"chosen: best of the candidates tried, by {metric} {where}")
        notes += [*problems_of_choice(plan), *_extended(rows)]
        if len(tried := {len(entry.candidates) for entry in plan.entries}) > 1:
            notes.append(f"budgets differ: between {min(tried)} and {max(tried)} candidates were tried")
    notes += [*_silos(rows), *_same_models(rows), *_below_start(rows), *_made_otherwise(rows)]
    return tuple(notes)


def _extended(rows: Sequence[Row]) -> list[str]:
    """Notes on added candidates, and on chosen values that are still at the edge of their grid."""
    added = [
        f"{row.entry.name} {', '.join(_setting(text, short=True) for text in candidate)}"
        for row in rows
        for candidate in row.entry.added
    ]
    edges = [
        f"{row.entry.name} {key.rpartition('.')[2]}={value:g}"
        for row in rows
        for key, value in at_edge(row.entry, row.chosen).items()
    ]
    return [
        *([f"trials added beyond or between the given values: {'; '.join(added)}"] if added else []),
        *([f"chosen at the edge of the values tried: {'; '.join(edges)}"] if edges else []),
    ]


def problems_of_choice(plan: ComparisonPlan) -> list[str]:
    """Warnings if the chosen candidates are evaluated on the split, or with a seed, by which they were chosen."""
    problems = []
    if plan.measured_on_validation:
        problems.append(
            "evaluation.split is val, on which --select chooses, so figures of chosen candidates are too high; "
            "evaluation.split=test measures them on other items"
        )
    both = [str(seed) for seed in plan.seeds if seed in plan.select_seeds]
    if both and any(len(entry.candidates) > 1 for entry in plan.entries):
        problems.append(f"in --seeds and in --select-seeds: {', '.join(both)}; choose with seeds that are not measured")
    return problems


def _summaries(row: Row) -> list[RunSummary]:
    """Summaries of a row's runs; rows that need no training have none."""
    return [own.summary for own in row.outcomes.values() if own.summary is not None]


def _silos(rows: Sequence[Row]) -> list[str]:
    """Notes on the silos' data over all seeds, one for each group of equal rows, and on rows with one-step tasks."""
    about = dict[str, list[str]]()
    for row in rows:
        silos = [each for own in _summaries(row) for each in own.per_silo.values()]
        if silos:
            text = about_silos([(each.samples, each.steps, each.label_divergence) for each in silos])
            about.setdefault(text, []).append(row.entry.name)
    notes = [text if len(about) == 1 else f"{', '.join(names)}: {text}" for text, names in about.items()]
    single = [row.entry.name for row in rows if any(own.one_step_tasks for own in _summaries(row))]
    return notes + ([f"every task is one optimiser step: {', '.join(single)}"] if single else [])


def _same_models(rows: Sequence[Row]) -> list[str]:
    """Notes on rows with bit-identical models for every seed: the settings in which they differ have no effect."""
    same = dict[tuple[str, ...], list[str]]()
    for row in rows:
        found = {seed: own.summary for seed, own in row.outcomes.items() if own.summary is not None}
        if found and not any(own.personal_only for own in found.values()):
            same.setdefault(tuple(found[seed].model_digest for seed in sorted(found)), []).append(row.entry.name)
    return [f"bit-identical models: {enumerated(names)}" for names in same.values() if len(names) > 1]


def _below_start(rows: Sequence[Row]) -> list[str]:
    """A note on rows with runs that ended below the untrained model."""
    below = [(row.entry.name, sum(own.below_start is not None for own in _summaries(row))) for row in rows]
    named = [f"{name} ({counted(count, 'seed')})" for name, count in below if count]
    return [f"ended below the untrained model: {', '.join(named)}"] if named else []


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

    The title is above the first table, and the notes are below the last; both may be wider than the terminal, which has
    ``width`` characters.
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
            "added": len(row.entry.added),
            "against": row.against,
            **{
                f"{column}.{part}": None if isinstance(value, float) and math.isnan(value) else value
                for column, statistic in row.columns.items()
                for part, value in vars(statistic).items()
            },
        }
        for row in rows
    ]


def runs(rows: Sequence[Row], plan: ComparisonPlan, *, courses: bool = False) -> list[dict[str, object]]:
    """Every run as plain data: its row, seed, values, model and folder; unknown values are None.

    With ``courses`` also the first metric over the merges, as version and value of each evaluation.
    """
    return [
        {
            "name": row.entry.name,
            "seed": seed,
            **{metric: outcome.value(metric) if outcome.shows(metric) else None for metric in plan.metrics},
            **{target.title: outcome.time_to(target) for target in plan.targets},
            "model_digest": None if outcome.summary is None else outcome.summary.model_digest,
            "folder": str(outcome.folder.root),
            **({"course": [(at, value) for at, _, value in outcome.course(plan.metrics[0])]} if courses else {}),
        }
        for row in rows
        for seed, outcome in row.outcomes.items()
    ]
