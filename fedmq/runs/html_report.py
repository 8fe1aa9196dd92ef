"""The report of a run: curves, tables and the scenario on one self-contained HTML page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from fedmq.data.raw_set import read_text
from fedmq.errors import InputError
from fedmq.evaluation.fairness import fairness_of
from fedmq.evaluation.metrics import HEADLINE, Metric, is_known, metric_of, shown
from fedmq.runs.html_figures import Figure
from fedmq.runs.results import read_metrics, read_summary
from fedmq.runs.run_records import EvaluationLine, MergeLine, PersonalLine, RunSummary
from fedmq.storage.run_folder import RunFolder, write_text

_HEIGHT = 380  # of a figure [pixels]

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem;color:#1c2733}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}table{border-collapse:collapse;margin:.5rem 0}
td,th{padding:.2rem .8rem;border-bottom:1px solid #dde3ea;text-align:right}
td:first-child,th:first-child{text-align:left}
code{background:#f2f5f8;padding:.1rem .3rem;border-radius:3px;word-break:break-all}
"""


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    def cells(tag: str, row: Iterable[object]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in row) + "</tr>"

    return "<table>" + cells("th", head) + "".join(cells("td", row) for row in rows) + "</table>"


def _retrieval(title: str, found: list[tuple[int, dict[str, float]]], own: Sequence[Metric]) -> list[Figure]:
    """Metrics over merges: one figure for all that are fractions, and one for each other metric."""
    figures: dict[str, Figure] = {}
    for metric in shown(found[-1][1], own):
        if metric.way not in ("", "mean"):
            continue
        fraction = (metric.low, metric.high) == (0.0, 1.0)
        key = "fraction" if fraction else metric.title
        head = title if fraction else f"{title}: {metric.title}"
        figure = figures.setdefault(key, Figure(head, "merges", key, _HEIGHT))
        known = [(version, values[metric.name]) for version, values in found if metric.name in values]
        x, y = [version for version, _ in known], [value for _, value in known]
        figure.draw("scatter", x=x, y=y, name=metric.name, mode="lines+markers")
    return list(figures.values())


def _curves(
    evaluations: Sequence[EvaluationLine],
    merges: Sequence[MergeLine],
    personal: Sequence[PersonalLine],
    own: Sequence[Metric],
) -> str:
    shared = [(line.version, line.metrics) for line in evaluations]
    figures = _retrieval("Retrieval on the held-out split", shared, own)
    if len(personal) > 1:
        means = [(line.version, line.personal) for line in personal]
        figures += _retrieval("Personal models on the held-out split, means over silos", means, own)
    figures.append(_spread(evaluations, personal))
    losses = {line.version: line.loss for line in merges if line.loss is not None}
    if losses:
        figure = Figure("Mean training loss of the silos merged", "merges", "loss", _HEIGHT)
        figure.draw("scatter", x=list(losses), y=list(losses.values()), mode="lines")
        figures.append(figure)
        figures.append(_losses(merges))
    for title, found in _reported(merges).items():
        figure = Figure(title, "merges", title, _HEIGHT)
        for name, values in found.items():
            # Markers, because a line does not show a single value.
            marker, x, y = {"size": 3}, list(values), list(values.values())
            figure.draw("scatter", x=x, y=y, name=name, mode="lines+markers", marker=marker)
        figures.append(figure)
    return "".join(figure.to_html(first=place == 0) for place, figure in enumerate(figures))


def _losses(merges: Sequence[MergeLine]) -> Figure:
    """Training loss of each silo, at the merges with a reply from it."""
    found: dict[str, dict[int, float]] = {}
    for line in merges:
        for silo, loss in line.losses.items():
            found.setdefault(silo, {})[line.version] = loss
    figure = Figure("Training loss of each silo", "merges", "loss", _HEIGHT)
    for silo, losses in sorted(found.items()):
        x, y = list(losses), list(losses.values())
        figure.draw("scatter", x=x, y=y, name=silo, mode="lines+markers", marker={"size": 3})
    return figure


def _spread(evaluations: Sequence[EvaluationLine], personal: Sequence[PersonalLine]) -> Figure:
    """Standard deviation of R@1 over silos, of the shared model and, if evaluated, of the personal models."""
    figure = Figure("Standard deviation of R@1 over silos", "merges", "fraction", _HEIGHT)
    shared = {line.version: fairness_of(line.per_silo)["std_r1"] for line in evaluations}
    stds = [(line.version, line.personal_fairness.get("std_r1")) for line in personal]
    known = {version: std for version, std in stds if std is not None}
    for name, found in (("shared model", shared), ("personal models", known)):
        if found:
            figure.draw("scatter", x=list(found), y=list(found.values()), name=name, mode="lines+markers")
    return figure


def _reported(merges: Sequence[MergeLine]) -> dict[str, dict[str, dict[int, float]]]:
    """Values that the method reported of its merges, such as ``router_loss``: figure -> curve -> value by version.

    Values of single silos, such as ``weight_silo-03``, share a figure.
    """
    found: dict[str, dict[str, dict[int, float]]] = {}
    for line in merges:
        for key, value in line.reported.items():
            title = key.partition("-")[0].replace("_", " ")
            found.setdefault(title, {}).setdefault(key, {})[line.version] = value
    return found


def _silos(summary: RunSummary) -> str:
    colours = {2: "#2a6fbb", 1: "#d98c2b"}
    silos = summary.per_silo
    figure = Figure("Mean R@1 on each silo's held-out items (orange: one modality)", "", "fraction", _HEIGHT)
    figure.draw(
        "bar",
        x=list(silos),
        y=[entry.figures[HEADLINE] for entry in silos.values()],
        marker={"color": [colours[len(entry.modalities)] for entry in silos.values()]},
        hovertext=[
            f"{' + '.join(entry.modalities)}, {entry.samples} samples, {entry.participations} replies"
            + (f", {entry.heldout} held-out items" if entry.heldout is not None else "")
            for entry in silos.values()
        ],
    )
    return figure.to_html(first=False)


def _title(name: str, own: Sequence[Metric] = ()) -> str:
    """Title of a metric; empty for metrics that this version of fedmq does not know."""
    return metric_of(name, own).title if is_known(name, own) else ""


def write(folder: RunFolder) -> None:
    """Write ``report.html`` from ``summary.json`` and ``metrics.jsonl``.

    Raises:
        InputError: the run is not finished, or its files are invalid.
    """
    summary, lines = read_summary(folder), read_metrics(folder)
    evaluations = [line for line in lines if isinstance(line, EvaluationLine)]
    merges = [line for line in lines if isinstance(line, MergeLine)]
    personal = [line for line in lines if isinstance(line, PersonalLine)]
    if not evaluations:
        raise InputError(str(folder.metrics), "no evaluation", "the lines of a finished run")
    first, own = evaluations[0].metrics, tuple(summary.own_metrics.values())
    rows = [
        (name, f"{first.get(name, float('nan')):.4f}", f"{value:.4f}", _title(name, own))
        for name, value in summary.metrics.items()
    ]
    up, down = summary.bytes.up, summary.bytes.down
    traffic = [(kind, f"{up.get(kind, 0):,}", f"{down.get(kind, 0):,}") for kind in sorted({*up, *down})]
    body = [
        f"<h1>{html.escape(summary.scenario)}: {html.escape(summary.protocol)}, seed {summary.seed}</h1>",
        f"<p>{summary.versions} merges, {len(summary.per_silo)} silos, "
        f"model digest <code>{html.escape(summary.model_digest)}</code></p>",
        _curves(evaluations, merges, personal, own),
        "<h2>Retrieval</h2>",
        _table(("metric", "before training", "after", "what it is"), rows),
        _silos(summary),
        _table(
            ("fairness over silos", "value", "what it is"),
            [(name, f"{value:.4f}", _title(name)) for name, value in summary.fairness.items()],
        ),
        "<h2>Traffic [bytes of payload tensors]</h2>",
        _table(("payload", "from the silos", "to the silos"), traffic),
        "<h2>Seconds</h2>",
        _table(("phase", "seconds"), summary.seconds.plain().items()),
        "<h2>Scenario</h2>",
        f"<pre>{html.escape(read_text(folder.scenario))}</pre>",
    ]
    title = html.escape(f"{summary.scenario} - fedmq")
    head = f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style>"
    page = head + "".join(body) + "</html>"
    write_text(folder.report, page)
