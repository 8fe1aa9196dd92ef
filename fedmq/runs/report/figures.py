"""The figures of a run's report, from the run's records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedmq.evaluation.metrics import Metric, shown
from fedmq.evaluation.recall import HEADLINE, fairness_of
from fedmq.runs.report.data import Example, ReportData, Space
from fedmq.runs.report.html import COLOURS, Figure, colour
from fedmq.runs.report.logs import RUN_TIME, LogFacts
from fedmq.runs.run_records import EvaluationLine, MergeLine, PersonalLine, RunSummary

if TYPE_CHECKING:
    from fedmq.federation.protocol import ReportedValue

_PLACES = {"rounds": "round", "traffic": "traffic [MB]"}


def curves(
    evaluations: Sequence[EvaluationLine],
    merges: Sequence[MergeLine],
    personal: Sequence[PersonalLine],
    custom: Sequence[Metric],
    bytes_at: Mapping[int, int],
    clock: str = RUN_TIME,
) -> list[Figure]:
    """Retrieval and training loss over a run.

    Args:
        evaluations: evaluations of the shared model; may be empty while a run begins.
        merges: merges of the run.
        personal: evaluations of the personal models.
        custom: user-defined metrics.
        bytes_at: payload bytes in both directions until the first message about each version.
        clock: title of the time axis.
    """
    figures: list[Figure] = []
    versions = {line.version for line in evaluations}
    axes: dict[str, dict[int, float]] = {"rounds": {version: float(version) for version in versions}}
    if len(bytes_at) > 1:
        axes["traffic"] = {version: bytes_at[version] / 1e6 for version in versions if version in bytes_at}
    axes["time"] = {0: 0.0, **{line.version: line.now for line in merges if line.version in versions}}
    if evaluations:
        shared = [(line.version, line.metrics) for line in evaluations]
        note = "The shared model on the whole held-out split, mean of both directions. Round 0 is the untrained model."
        figures += retrieval("Retrieval on the held-out split", shared, custom, axes, note, clock)
    if len(personal) > 1:
        means = [(line.version, line.personal) for line in personal]
        note = "Each silo's personal model on the whole held-out split; means over silos."
        figures += retrieval("Retrieval of the personal models", means, custom, axes, note, clock)
    return [*figures, *losses(merges)]


def retrieval(
    title: str,
    evaluations: Sequence[tuple[int, Mapping[str, float]]],
    custom: Sequence[Metric],
    axes: Mapping[str, Mapping[int, float]],
    note: str,
    clock: str = RUN_TIME,
) -> list[Figure]:
    """Metrics over the run: one figure for all that are fractions, and one for each other metric.

    Args:
        title: title of the first chart.
        evaluations: version and metrics of each evaluation.
        custom: user-defined metrics.
        axes: places of the versions on each available axis, ``rounds`` first; a menu switches between them.
        note: below the figures.
        clock: title of the time axis.
    """
    figures: dict[str, Figure] = {}
    versions: dict[str, list[list[int]]] = {}
    for metric in shown(evaluations[-1][1], custom):
        if metric.way not in ("", "mean"):
            continue
        fraction = (metric.low, metric.high) == (0.0, 1.0)
        key = "fraction" if fraction else metric.title
        head = title if fraction else f"{title}: {metric.title}"
        figure = figures.setdefault(key, Figure(head, "round", key, note=note))
        known = [(version, values[metric.name]) for version, values in evaluations if metric.name in values]
        x, y = [version for version, _ in known], [value for _, value in known]
        versions.setdefault(key, []).append(x)
        figure.draw(
            "scatter",
            x=x,
            y=y,
            name=metric.heading,
            mode="lines+markers",
            marker={"size": 5},
            hovertemplate=f"{metric.title}: %{{y:.4f}}<br>%{{x}}<extra></extra>",
        )
    for key, figure in figures.items():
        if len(axes) > 1:
            figure.layout["updatemenus"] = [_axis_menu(axes, versions[key], clock)]
            figure.layout["margin"] = {"t": 48}
    return list(figures.values())


def _axis_menu(
    axes: Mapping[str, Mapping[int, float]], versions: Sequence[Sequence[int]], clock: str
) -> dict[str, object]:
    buttons = [
        {
            "label": f"over {name}",
            "method": "update",
            "args": [
                {"x": [[places.get(version) for version in trace] for trace in versions]},
                {"xaxis.title.text": _PLACES.get(name, clock), "xaxis.dtick": None},
            ],
        }
        for name, places in axes.items()
    ]
    return {"type": "buttons", "direction": "right", "x": 0, "xanchor": "left", "y": 1.16, "buttons": buttons}


def losses(merges: Sequence[MergeLine]) -> list[Figure]:
    """Mean training loss over rounds, and that of each silo; no figure if no silo reports a loss.

    A loss of exactly 0 is left out: the silo had nothing to train on yet, as one with a single modality in the first
    round of a method that trains it towards the prototypes of others.
    """
    trained = {line.version: {silo: loss for silo, loss in line.losses.items() if loss} for line in merges}
    means = {
        line.version: sum(trained[line.version].values()) / len(trained[line.version])
        if trained[line.version]
        else line.loss
        for line in merges
        if line.loss
    }
    if not means:
        return []
    left_out = any(0 in line.losses.values() for line in merges)
    zero = " A loss of 0 is left out: the silo had nothing to train on in that round." * left_out
    mean = Figure("Training loss", "round", "loss", note=f"Mean over the silos whose replies were merged.{zero}")
    mean.draw("scatter", x=list(means), y=list(means.values()), mode="lines", name="mean")
    by_silo: dict[str, dict[int, float]] = {}
    for line in merges:
        for silo, loss in trained[line.version].items():
            by_silo.setdefault(silo, {})[line.version] = loss
    note = "At the merges with a reply from the silo. Click a name to hide a silo, double-click to see it alone."
    silos = Figure("Training loss of each silo", "round", "loss", note=note)
    for silo, values in sorted(by_silo.items()):
        silos.draw(
            "scatter", x=list(values), y=list(values.values()), name=silo, mode="lines+markers", marker={"size": 3}
        )
    return [mean, silos] if by_silo else [mean]


def spread(evaluations: Sequence[EvaluationLine], personal: Sequence[PersonalLine]) -> Figure:
    """Standard deviation of R@1 over silos, of the shared model and, if evaluated, of the personal models."""
    figure = Figure(
        "How much silos differ",
        "round",
        "standard deviation of R@1",
        note="R@1 with each silo's own held-out items as queries. 0 means that all silos are served equally well.",
    )
    shared = {line.version: fairness_of(line.per_silo)["std_r1"] for line in evaluations}
    stds = [(line.version, line.personal_fairness.get("std_r1")) for line in personal]
    known = {version: std for version, std in stds if std is not None}
    for name, values in (("shared model", shared), ("personal models", known)):
        if values:
            figure.draw("scatter", x=list(values), y=list(values.values()), name=name, mode="lines+markers")
    return figure


def reported(
    merges: Sequence[MergeLine], modalities: Mapping[str, Sequence[str]], captions: Mapping[str, ReportedValue]
) -> list[Figure]:
    """Values that the method reports of its merges; weights of single silos are stacked.

    Args:
        merges: merges of the run.
        modalities: modalities of each silo, by name; empty for a silo whose modalities are not known.
        captions: how to show these values, by name, as the method says.
    """
    by_name: dict[str, dict[int, float]] = {}
    for line in merges:
        for key, value in line.reported.items():
            by_name.setdefault(key, {})[line.version] = value
    by_silo = {
        key.removeprefix("weight_"): values for key, values in by_name.items() if key[len("weight_") :] in modalities
    }
    figures = [_stacked(merges, by_silo, modalities)] if by_silo else []
    for key, values in by_name.items():
        if key[len("weight_") :] in modalities:
            continue
        title, axis = key.replace("_", " ").capitalize(), key.replace("_", " ")
        note = "Reported by the method for each merge."
        if (caption := captions.get(key)) is not None:
            title, axis, note = caption.title, caption.axis, caption.meaning
        figure = Figure(title, "round", axis, note=note)
        # Markers, because a line does not show a single value.
        x, y = list(values), list(values.values())
        figure.draw("scatter", x=x, y=y, name=title, mode="lines+markers", marker={"size": 3}, showlegend=False)
        figures.append(figure)
    return figures


def _stacked(
    merges: Sequence[MergeLine], weights: Mapping[str, Mapping[int, float]], modalities: Mapping[str, Sequence[str]]
) -> Figure:
    """The aggregation weights of all silos, stacked, those with one modality at the top."""
    note = "Weight of each silo in a merge; a silo without a reply has none. Silos with one modality are at the top."
    figure = Figure("Aggregation weights", "round", "weight", note=note)
    versions = [line.version for line in merges]
    for silo in sorted(weights, key=lambda name: (len(modalities[name]) == 1, name)):
        y = [weights[silo].get(version, 0.0) for version in versions]
        name = f"{silo} ({' + '.join(modalities[silo])})" if modalities[silo] else silo
        figure.draw("bar", x=versions, y=y, name=name, marker={"line": {"width": 0}})
    figure.layout |= {"barmode": "stack", "bargap": 0}
    return figure


def staleness(merges: Sequence[MergeLine]) -> Figure | None:
    """Staleness of the merged replies; None if all were fresh, as in synchronous rounds."""
    points = [(line.version, value) for line in merges for value in line.staleness]
    if not any(value for _, value in points):
        return None
    note = "Number of merges between the model that a silo started from and the merge of its reply. 0 is a fresh reply."
    figure = Figure("Staleness of the merged replies", "round", "merges", note=note)
    mean = {line.version: sum(line.staleness) / len(line.staleness) for line in merges if line.staleness}
    x, y = [version for version, _ in points], [value for _, value in points]
    figure.draw("scatter", x=x, y=y, mode="markers", name="reply", marker={"size": 4, "opacity": 0.35})
    figure.draw("scatter", x=list(mean), y=list(mean.values()), mode="lines", name="mean of a merge")
    return figure


def silos(summary: RunSummary) -> list[Figure]:
    """Retrieval and participation of each silo, coloured by modality."""
    names, entries = list(summary.per_silo), list(summary.per_silo.values())
    legend = {
        ("image", "text"): ("images and captions", 0),
        ("image",): ("images only", 1),
        ("text",): ("captions only", 2),
    }
    quality = Figure(
        "Retrieval for each silo",
        "",
        "R@1 of the shared model",
        note="Mean of both directions, uncertain with few items; queries are the silo's own held-out items.",
    )
    busy = Figure("Participation", "", "merged replies", note="Number of each silo's replies that were merged.")
    for kinds, (name, place) in legend.items():
        rows = [place_ for place_, entry in enumerate(entries) if tuple(sorted(entry.modalities)) == kinds]
        if not rows:
            continue
        text = [f"{entries[row].samples:,} training items, {entries[row].participations} replies" for row in rows]
        marker, x = {"color": COLOURS[place]}, [names[row] for row in rows]
        scores = [entries[row].figures.get(HEADLINE) for row in rows]
        quality.draw("bar", x=x, y=scores, name=name, marker=marker, hovertext=text)
        counts = [entries[row].participations for row in rows]
        busy.draw("bar", x=x, y=counts, name=name, marker=marker, hovertext=text)
    for figure in (quality, busy):
        figure.x |= {"type": "category", "categoryorder": "array", "categoryarray": names}
    return [quality, busy]


def holdings(data: ReportData, modalities: Mapping[str, Sequence[str]]) -> Figure | None:
    """Heat map of the number of training items by silo and label; None if the data have no labels."""
    if not data.classes or not data.holdings:
        return None
    names = list(data.holdings)
    shown_names = [f"{name} ({'+'.join(modalities.get(name, ()))})" for name in names]
    figure = Figure(
        "Who holds what",
        "label",
        "",
        max(260, 18 * len(names) + 140),
        "Training items of each silo with each label. Items with several labels count for each.",
    )
    figure.draw(
        "heatmap",
        x=data.classes,
        y=shown_names,
        z=[data.holdings[name] for name in names],
        colorscale="Viridis",
        hovertemplate="%{y}<br>%{x}: %{z} items<extra></extra>",
        colorbar={"title": {"text": "items"}},
    )
    figure.y |= {"type": "category", "autorange": "reversed"}
    return figure


def traffic(facts: LogFacts, summary: RunSummary) -> list[Figure]:
    """Payload bytes by kind and silo as logged, or by kind alone if there is no log."""
    figures = []
    known = sorted(summary.bytes.up.keys() | summary.bytes.down.keys())
    colours = {kind: colour(place) for place, kind in enumerate(known)}  # the same in both figures
    for title, table, total in (
        ("Traffic from the silos", facts.up, summary.bytes.up),
        ("Traffic to the silos", facts.down, summary.bytes.down),
    ):
        figure = Figure(title, "", "payload [MB]", note="Tensors of the messages by kind of payload, without headers.")
        kinds = sorted(total)
        for kind in kinds:
            if table:
                x = sorted(table)
                y = [table[silo][kind] / 1e6 for silo in x]
            else:
                x, y = [kind.replace("_", " ")], [total[kind] / 1e6]
            figure.draw("bar", x=x, y=y, name=kind.replace("_", " "), marker={"color": colours[kind]})
        figure.layout["barmode"] = "stack"
        if kinds:
            figures.append(figure)
    return figures


def examples(data: ReportData) -> list[tuple[str, str, list[Example]]]:
    """Groups of examples: title, a sentence if the group needs none, and its examples, in the order of the page.

    A case that is right at rank 1, or already among the best, does not count as one of the worst.
    """
    ways, groups = (("t2i", "text to image"), ("i2t", "image to text")), []
    best = [example for example in data.examples if example.best]
    for way, name in ways:
        groups.append((f"Best cases, {name}", "", [example for example in best if example.way == way]))
    shown_queries = {(example.way, example.query.key, example.query.caption) for example in best}
    for way, name in ways:
        worst = [example for example in data.examples if not example.best and example.way == way and example.rank > 1]
        said = "" if worst else f"No {name} query went wrong: the right item is always at rank 1."
        new = [example for example in worst if (way, example.query.key, example.query.caption) not in shown_queries]
        groups.append((f"Worst cases, {name}", said, new))
    return [group for group in groups if group[1] or group[2]]


def space(title: str, pairs: Space) -> Figure:
    """Held-out pairs in the plane, each image joined to its caption by a line."""
    note = "Two largest principal components of the embeddings. A short line means that a pair lies close together."
    figure = Figure(title, "", "", 440, note)
    x: list[float | None] = []
    y: list[float | None] = []
    for image, text in zip(pairs.image, pairs.text, strict=True):
        x += [image[0], text[0], None]
        y += [image[1], text[1], None]
    figure.draw(
        "scatter", x=x, y=y, mode="lines", line={"width": 0.5, "color": "#9aa7b4"}, hoverinfo="skip", showlegend=False
    )
    for name, points, place, symbol in (("image", pairs.image, 0, "circle"), ("caption", pairs.text, 1, "x")):
        figure.draw(
            "scatter",
            x=[point[0] for point in points],
            y=[point[1] for point in points],
            mode="markers",
            name=name,
            marker={"size": 6, "symbol": symbol, "color": COLOURS[place]},
        )
    figure.x |= {"showticklabels": False}
    figure.y |= {"showticklabels": False, "scaleanchor": "x"}
    return figure
