"""Several runs on one page: their results in a table, and their curves in common figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedmq.evaluation.metrics import BRIEF, is_known, metric_of
from fedmq.runs.report.html import Figure, colour, render
from fedmq.runs.result_limits import gallery_of, meaningful
from fedmq.runs.results import read_metrics, read_summary
from fedmq.runs.run_records import EvaluationLine, MergeLine, RunSummary
from fedmq.storage.run_folder import RunFolder, write_text

#: Metrics that have a figure: those of the short display, and fairness.
_CURVES = (*BRIEF, "map")
#: Maximum number of silos whose names are drawn horizontally below a chart.
_MOST_LEVEL = 10


@dataclass(frozen=True)
class _Read:
    name: str
    summary: RunSummary
    evaluations: tuple[EvaluationLine, ...]
    merges: tuple[MergeLine, ...]

    @property
    def metrics(self) -> dict[str, float]:
        """Of the summary, without recalls that every model reaches in so small a gallery."""
        return meaningful(self.summary.metrics, gallery_of(self.summary))


def write(folders: Sequence[RunFolder], path: Path) -> None:
    """Write the page into a file; arguments and errors as in :func:`page`, and DiskError."""
    write_text(path, page(folders))


def page(folders: Sequence[RunFolder]) -> str:
    """The page of several runs.

    Args:
        folders: folders of finished runs, at least two.

    Raises:
        InputError: a run is not finished, or its files are invalid.
    """
    runs = [_read(folder) for folder in folders]
    columns = list(dict.fromkeys(name for run in runs for name in run.metrics))
    rows = [
        (
            name,
            *(f"{run.metrics[name]:.4f}" if name in run.metrics else "-" for run in runs),
            _title(name),
        )
        for name in columns
    ]
    facts = [
        ("method", *(run.summary.method for run in runs)),
        ("seed", *(str(run.summary.seed) for run in runs)),
        ("rounds", *(str(run.summary.versions) for run in runs)),
        ("silos", *(str(len(run.summary.per_silo)) for run in runs)),
        (
            "R@1 of the worst-served silo",
            *(_shown(run.summary.fairness.get("worst_r1")) for run in runs),
        ),
        ("payload from the silos [MB]", *(f"{sum(run.summary.bytes.up.values()) / 1e6:,.1f}" for run in runs)),
        ("payload to the silos [MB]", *(f"{sum(run.summary.bytes.down.values()) / 1e6:,.1f}" for run in runs)),
        ("real time [s]", *(f"{run.summary.seconds.total:.1f}" for run in runs)),
    ]
    same_data = len({run.summary.data_digest for run in runs}) == 1
    return render(
        "side_by_side.html.jinja",
        title=", ".join(run.name for run in runs),
        names=[run.name for run in runs],
        same_data=same_data,
        facts=facts,
        metrics=rows,
        figures=[_curve(runs, name) for name in _CURVES if any(name in run.metrics for run in runs)]
        + [_losses(runs), _silos(runs)],
    )


def _read(folder: RunFolder) -> _Read:
    lines = read_metrics(folder)
    evaluations = tuple(line for line in lines if isinstance(line, EvaluationLine))
    merges = tuple(line for line in lines if isinstance(line, MergeLine))
    return _Read(folder.root.resolve().name, read_summary(folder), evaluations, merges)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _title(name: str) -> str:
    return metric_of(name).title if is_known(name) else ""


def _curve(runs: Sequence[_Read], metric: str) -> Figure:
    heading = metric_of(metric).heading if is_known(metric) else metric
    figure = Figure(_title(metric), "round", heading, note="On the whole held-out split of each run.")
    for place, run in enumerate(runs):
        lines = run.evaluations if metric in run.metrics else ()
        known = [(line.version, line.metrics[metric]) for line in lines if metric in line.metrics]
        figure.draw(
            "scatter",
            x=[version for version, _ in known],
            y=[value for _, value in known],
            name=run.name,
            mode="lines",
            line={"color": colour(place)},
        )
    return figure


def _losses(runs: Sequence[_Read]) -> Figure:
    figure = Figure("Training loss", "round", "loss", note="Losses of different methods are not comparable.")
    for place, run in enumerate(runs):
        known = {line.version: line.loss for line in run.merges if line.loss is not None}
        x, y = list(known), list(known.values())
        figure.draw("scatter", x=x, y=y, name=run.name, mode="lines", line={"color": colour(place)})
    return figure


def _silos(runs: Sequence[_Read]) -> Figure:
    note = "R@1 of the shared model; the queries are each silo's own held-out items."
    figure = Figure("Retrieval for each silo", "", "R@1", note=note)
    for place, run in enumerate(runs):
        silos = run.summary.per_silo
        y = [silo.figures.get("mean_r1") for silo in silos.values()]
        figure.draw("bar", x=list(silos), y=y, name=run.name, marker={"color": colour(place)})
    figure.layout["barmode"] = "group"
    if len({name for run in runs for name in run.summary.per_silo}) > _MOST_LEVEL:
        figure.x["tickangle"] = 90
    return figure
