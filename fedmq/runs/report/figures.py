"""The figures of a run's report, from the run's records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING

from fedmq.evaluation.metrics import Metric, shown
from fedmq.evaluation.recall import HEADLINE
from fedmq.runs.data_records import Example, ReportData, Space
from fedmq.runs.report.html import COLOURS, Figure, colour
from fedmq.runs.run_records import EvaluationLine, MergeLine, PersonalLine, RunSummary
from fedmq.text import counted

if TYPE_CHECKING:
    from fedmq.federation.protocol import ReportedValue

#: What silos hold, by modalities: in words, and the colour of their figures.
_KINDS: Mapping[tuple[str, ...], tuple[str, str]] = {
    ("image", "text"): ("images and captions", COLOURS[0]),
    ("image",): ("images only", COLOURS[1]),
    ("text",): ("captions only", COLOURS[2]),
}
#: A silo with fewer held-out items is drawn in pale colour.
_FEW = 30
_BANDS = "Bands: from the lowest to the highest silo of a modality; lines: their median; dotted: the silo of the menu."
_PLACES = {"rounds": "round", "traffic": "traffic [MB]"}


@dataclass(frozen=True)
class SiloResult:
    """R@1 of the shared model on a silo's own held-out items."""

    kind: tuple[str, ...]  # modalities of the silo, sorted
    items: int  # number of these items
    before: float | None  # of the untrained model; None if it was not evaluated
    after: float  # at the end

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of ``after``."""
        return interval(self.after, self.items)


def curves(
    evaluations: Sequence[EvaluationLine],
    merges: Sequence[MergeLine],
    personal: Sequence[PersonalLine],
    custom: Sequence[Metric],
    bytes_at: Mapping[int, int],
    clock: str,
) -> list[Figure]:
    """Retrieval over a run."""
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
    return figures


def retrieval(
    title: str,
    evaluations: Sequence[tuple[int, Mapping[str, float]]],
    custom: Sequence[Metric],
    axes: Mapping[str, Mapping[int, float]],
    note: str,
    clock: str,
) -> list[Figure]:
    """Metrics over the run: one figure for all that are fractions, and one for each other metric."""
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
        drawn = versions.setdefault(key, [])
        shade = COLOURS[len({each.get("name") for each in figure.traces} - {None}) % len(COLOURS)]
        draw_noisy(figure, x, y, metric.heading, shade, f"{metric.title}: %{{y:.4f}}<br>%{{x}}<extra></extra>")
        drawn += [x] * (len(figure.traces) - len(drawn))
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


def smooth(values: Sequence[float]) -> list[float]:
    """Centred moving mean over a tenth of the values, fewer at the ends; fewer than 20 values as they are."""
    reaches = [min(len(values) // 20, at, len(values) - 1 - at) for at in range(len(values))]
    windows = (values[at - reach : at + reach + 1] for at, reach in enumerate(reaches))
    return [sum(window) / len(window) for window in windows]


def draw_noisy(
    figure: Figure, x: Sequence[float], y: Sequence[float], name: str, shade: str, hover: str = "", **more: object
) -> None:
    """A curve, smoothed if it is long, with the values themselves behind it, which the pointer shows."""
    smoothed = smooth(y)
    pointed = {"hovertemplate": hover} if hover else {}
    line = {"color": shade, "width": 2}
    if smoothed == list(y):
        figure.draw(
            "scatter", x=x, y=y, name=name, mode="lines+markers", marker={"size": 4}, line=line, **pointed, **more
        )
        return
    raw = {"line": {"color": shade, "width": 1}, "opacity": 0.35, "showlegend": False}
    figure.draw("scatter", x=x, y=y, name=name, mode="lines", **raw, **pointed)
    figure.draw("scatter", x=x, y=smoothed, name=name, mode="lines", line=line, hoverinfo="skip", **more)


def bands(
    figure: Figure,
    values: Mapping[str, Mapping[int, float]],
    modalities: Mapping[str, Sequence[str]],
    highlighted: str | None = None,
) -> None:
    """Values of silos over rounds: by modality a band from the lowest to the highest and the median, and one silo."""
    for kind in dict.fromkeys([*_KINDS, ()]):
        members = [found for silo, found in values.items() if tuple(sorted(modalities.get(silo, ()))) == kind]
        if not members:
            continue
        name, shade = _KINDS.get(kind, ("silos", COLOURS[0]))
        rounds = sorted({version for found in members for version in found})
        at = [sorted(found[version] for found in members if version in found) for version in rounds]
        if len(members) > 1:
            edges = [*smooth([each[-1] for each in at]), *smooth([each[0] for each in at])[::-1]]
            fill = {"fill": "toself", "fillcolor": shade, "opacity": 0.18, "line": {"width": 0}, "hoverinfo": "skip"}
            figure.draw("scatter", x=[*rounds, *rounds[::-1]], y=edges, mode="lines", showlegend=False, **fill)
        draw_noisy(figure, rounds, [median(each) for each in at], f"{name} ({len(members)}), median", shade)
    if len(values) > 1:
        first = highlighted if highlighted is not None and highlighted in values else min(values)
        line = {"color": COLOURS[3], "width": 2, "dash": "dot"}
        x, y = list(values[first]), list(values[first].values())
        figure.draw("scatter", x=x, y=y, name=first, mode="lines+markers", marker={"size": 4}, line=line)
        trace, names = len(figure.traces) - 1, [first, *sorted(values.keys() - {first})]
        choices = [
            (silo, [{"x": [list(values[silo])], "y": [list(values[silo].values())], "name": silo}, [trace]])
            for silo in names
        ]
        figure.choose(choices, "restyle", right=True)


def losses(
    merges: Sequence[MergeLine],
    modalities: Mapping[str, Sequence[str]] = MappingProxyType({}),
    first: str | None = None,
) -> list[Figure]:
    """Training loss over rounds: of the silos by modality; no figure if no silo reports a loss.

    A loss of exactly 0 is left out: the silo had nothing to train on yet, as one with a single modality in the first
    round of a method that trains it towards the prototypes of others.
    """
    by_silo: dict[str, dict[int, float]] = {}
    for line in merges:
        for silo, loss in line.losses.items():
            if loss:
                by_silo.setdefault(silo, {})[line.version] = loss
    means = {line.version: line.loss for line in merges if line.loss}
    if not means:
        return []
    figure = Figure("Training loss", "round", "loss", note=_BANDS + " At the merges with a reply from the silo.")
    if by_silo:
        bands(figure, by_silo, modalities, first)
    else:
        draw_noisy(figure, list(means), list(means.values()), "mean", COLOURS[0])
    if any(0 in line.losses.values() for line in merges):
        figure.note += " A loss of 0 is left out: the silo had nothing to train on in that round."
    return [figure]


def served(
    evaluations: Sequence[EvaluationLine],
    personal: Sequence[PersonalLine],
    modalities: Mapping[str, Sequence[str]] = MappingProxyType({}),
    first: str | None = None,
) -> list[Figure]:
    """R@1 of the silos over rounds: of the shared model and, if evaluated, of the personal models."""
    shared = [(line.version, line.per_silo) for line in evaluations]
    own = [(line.version, line.personal_per_silo) for line in personal]
    made = []
    for title, found in (("R@1 of the silos", shared), ("R@1 of the silos, personal models", own)):
        values: dict[str, dict[int, float]] = {}
        for version, by_silo in found:
            for silo, metrics in by_silo.items():
                if HEADLINE in metrics:
                    values.setdefault(silo, {})[version] = metrics[HEADLINE]
        if values and len(found) > 1:
            figure = Figure(title, "round", "R@1", note=_BANDS + " Queries are each silo's own held-out items.")
            bands(figure, values, modalities, first)
            made.append(figure)
    return made


def reported(
    merges: Sequence[MergeLine], modalities: Mapping[str, Sequence[str]], captions: Mapping[str, ReportedValue]
) -> list[Figure]:
    """Values that the method reports of its merges: weights of the silos by modality, and one chosen by a menu."""
    by_name: dict[str, dict[int, float]] = {}
    for line in merges:
        for key, value in line.reported.items():
            by_name.setdefault(key, {})[line.version] = value
    weights = {silo: by_name.pop(f"weight_{silo}") for silo in modalities if f"weight_{silo}" in by_name}
    figures = []
    if weights:
        figures.append(Figure("Aggregation weights", "round", "weight", note=f"{_BANDS} Weight of a silo in a merge."))
        bands(figures[0], weights, modalities)
        figures[0].y["rangemode"] = "tozero"
    if by_name:
        figure = Figure("Reported by the method", "round", "", note="The menu chooses the value.")
        titles, owners = [], []
        for place, (key, values) in enumerate(by_name.items()):
            caption, plain = captions.get(key), key.replace("_", " ").capitalize()
            titles.append(caption.title if caption else plain)
            figure.note += f" {titles[-1]}: {caption.meaning}" if caption else ""
            before = len(figure.traces)
            draw_noisy(figure, list(values), list(values.values()), titles[-1], COLOURS[0], showlegend=False)
            for trace in figure.traces[before:]:
                trace["visible"] = not place
            owners += [place] * (len(figure.traces) - before)
        choices = [
            (title, [{"visible": [owner == place for owner in owners]}, {"yaxis.title.text": title}])
            for place, title in enumerate(titles)
        ]
        figure.choose(choices, "update")
        figure.y |= {"rangemode": "tozero", "title": {"text": titles[0]}}
        figures.append(figure)
    return figures


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


def interval(recall: float, items: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a mean R@1 of both directions, as if all their queries were independent.

    ``items`` is the number of queries of the direction that has fewer.
    """
    n, z = 2 * max(1, items), 1.96
    middle, half = recall + z * z / (2 * n), z * math.sqrt(recall * (1 - recall) / n + z * z / (4 * n * n))
    return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))


def silos(found: Mapping[str, SiloResult]) -> Figure | None:
    """R@1 of each silo with its interval, before and after, sorted within each modality; None without any."""
    if not found:
        return None
    note = (
        "Open: the untrained model. Filled: after training, with its 95 % interval. Queries are the own held-out "
        f"items of each silo, mean of both directions; pale: fewer than {_FEW} of them, mostly chance."
    )
    figure = Figure("Retrieval for each silo", "R@1 of the shared model", "", 16 * len(found) + 130, note)
    order = list(_KINDS)
    names = sorted(found, key=lambda name: (order.index(found[name].kind), found[name].after))
    for kind, (title, shade) in _KINDS.items():
        some = [name for name in names if found[name].kind == kind]
        if not some:
            continue
        x: list[float | None] = []
        for name in some:
            x += [found[name].before, found[name].after, None]
        y = [each for name in some for each in (name, name, None)]
        line = {"color": shade, "width": 1}
        figure.draw("scatter", x=x, y=y, mode="lines", line=line, hoverinfo="skip", showlegend=False)
        hollow = {"color": shade, "symbol": "circle-open", "size": 7}
        before = [found[name].before for name in some]
        figure.draw("scatter", x=before, y=some, mode="markers", marker=hollow, showlegend=False, name="before")
        for few in (False, True):
            part = [name for name in some if (found[name].items < _FEW) == few]
            if not part:
                continue
            after, bounds = [found[name].after for name in part], [found[name].interval for name in part]
            plus = [high - value for value, (_, high) in zip(after, bounds, strict=True)]
            minus = [value - low for value, (low, _) in zip(after, bounds, strict=True)]
            figure.draw(
                "scatter",
                x=after,
                y=part,
                mode="markers",
                name=title,
                legendgroup=title,
                showlegend=not few or all(found[name].items < _FEW for name in some),
                opacity=0.45 if few else 1,
                marker={"color": shade, "size": 8},
                error_x={"array": plus, "arrayminus": minus, "thickness": 1, "width": 2},
                text=[counted(found[name].items, "held-out item") for name in part],
                hovertemplate="%{y}: %{x:.3f}<br>%{text}<extra></extra>",
            )
    figure.x |= {"range": [0, 1]}
    figure.y |= {"type": "category", "categoryorder": "array", "categoryarray": names, "dtick": 1}
    return figure


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
    figure.x |= {"type": "category", "dtick": 1}
    figure.y |= {"type": "category", "autorange": "reversed", "dtick": 1}
    return figure


def traffic(summary: RunSummary) -> Figure | None:
    """Payload bytes to and from the silos by kind; None if there were none."""
    figure = Figure("Traffic [MB]", "", "", 260, "Tensors of the messages by kind of payload, without headers.")
    ways = (("from the silos", summary.bytes.up), ("to the silos", summary.bytes.down))
    kinds = sorted(summary.bytes.up.keys() | summary.bytes.down.keys())
    for place, kind in enumerate(kinds):
        x = [table.get(kind, 0) / 1e6 for _, table in ways]
        marker = {"color": colour(place)}
        figure.draw("bar", orientation="h", x=x, y=[way for way, _ in ways], name=kind.replace("_", " "), marker=marker)
    figure.layout["barmode"] = "stack"
    figure.y["dtick"] = 1
    return figure if kinds else None


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


def space(before: Space | None, after: Space | None) -> Figure | None:
    """Held-out pairs in the plane before and after training, each image joined to its caption; None without any."""
    note = "Two largest principal components of the embeddings. A short line means that a pair lies close together."
    states = [(title, found) for title, found in (("after training", after), ("before training", before)) if found]
    figure = Figure("The shared space", states[0][0] if states else "", "", 440, note)
    for place, (_, pairs) in enumerate(states):
        x: list[float | None] = []
        y: list[float | None] = []
        for image, text in zip(pairs.image, pairs.text, strict=True):
            x += [image[0], text[0], None]
            y += [image[1], text[1], None]
        line = {"width": 0.5, "color": "#9aa7b4"}
        quiet = {"hoverinfo": "skip", "showlegend": False, "visible": not place}
        figure.draw("scatter", x=x, y=y, mode="lines", line=line, **quiet)
        for name, points, shade, symbol in (("image", pairs.image, 0, "circle"), ("caption", pairs.text, 1, "x")):
            x, y = [point[0] for point in points], [point[1] for point in points]
            marker = {"size": 6, "symbol": symbol, "color": COLOURS[shade]}
            figure.draw("scatter", x=x, y=y, mode="markers", name=name, marker=marker, visible=not place)
    figure.choose(
        [
            (title, [{"visible": [at // 3 == place for at in range(3 * len(states))]}, {"xaxis.title.text": title}])
            for place, (title, _) in enumerate(states)
        ],
        "update",
    )
    figure.x |= {"showticklabels": False}
    figure.y |= {"showticklabels": False, "scaleanchor": "x"}
    return figure if states else None
