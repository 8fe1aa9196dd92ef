"""The report of a run: its result in words, figures, examples and tables on one self-contained HTML page.

Also several runs on one page: their results in a table, and their curves in common figures.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from typing import TYPE_CHECKING

from fedmq.config.resolve import load
from fedmq.config.run_id import flat
from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.evaluation.metrics import BRIEF, Metric, is_known, metric_of
from fedmq.evaluation.recall import HEADLINE
from fedmq.packages import MissingPackageError
from fedmq.profiling import span
from fedmq.runs.data_records import ReportData
from fedmq.runs.report import figures
from fedmq.runs.report.figures import SiloResult, interval
from fedmq.runs.report.html import COLOURS, Figure, colour, render
from fedmq.runs.report.logs import LogFacts, LoggedFacts, incidents_text, read_logs, time_axis, timeline, unsummed
from fedmq.runs.results import (
    chosen_by_validation,
    gallery_of,
    items_each,
    items_left_out,
    meaningful,
    name_some,
    read_metrics,
    read_summary,
    shared_evaluations,
    training_warnings,
    with_own_figures,
)
from fedmq.runs.run_records import EvaluationLine, MergeLine, PersonalLine, RunSummary
from fedmq.storage.json_files import read_json
from fedmq.storage.regular_files import read_regular
from fedmq.storage.run_folder import RunFolder, write_text
from fedmq.text import counted, first_few, print_line, size_text, tensor_text
from fedmq.wire.log_records import SentPayloads
from fedmq.wire.messages import COORDINATOR, EVALUATOR

if TYPE_CHECKING:
    from fedmq.federation.protocol import ReportedValue


@contextlib.contextmanager
def warned_without_packages(folder: RunFolder) -> Iterator[None]:
    """Say why a run has no report if the block needs packages that this machine does not have."""
    try:
        yield
    except MissingPackageError as error:
        print_line(f"warning: {error}; or run fedmq report {folder.root} where it is installed")


@span("report")
def write(folder: RunFolder, captions: Mapping[str, ReportedValue], logged: LoggedFacts | None = None) -> None:
    """Write ``report.html``; arguments and errors as in :func:`page_of`, and DiskError."""
    write_text(folder.report, page_of(folder, captions, logged))


def page_of(folder: RunFolder, captions: Mapping[str, ReportedValue], logged: LoggedFacts | None = None) -> str:
    """The report of the run's records and, where they exist, ``report_data.json`` and the message logs.

    Raises:
        InputError: the run is not finished, or its files are invalid.
    """
    lines = read_metrics(folder)
    summary = with_own_figures(read_summary(folder))
    gallery = gallery_of(summary)
    evaluations = [
        line.model_copy(update={"metrics": meaningful(line.metrics, gallery)}) for line in shared_evaluations(lines)
    ]
    merges = [line for line in lines if isinstance(line, MergeLine)]
    personal = [line for line in lines if isinstance(line, PersonalLine)]
    if not evaluations and not summary.unevaluated:
        raise InputError(str(folder.metrics), "no evaluation", "the lines of a finished run")
    untrained = evaluations[0].metrics if evaluations else {}
    logged, data = logged or read_logs(folder), _data_of(folder, summary)
    facts, notes = logged.course, data.notes if data else []
    scenario, custom = load(folder.scenario), tuple(summary.custom_metrics.values())
    clock = time_axis(scenario)
    modalities = {name: silo.modalities for name, silo in summary.per_silo.items()}
    found = silo_results(summary, evaluations)
    worst = min(found, key=lambda name: found[name].after, default=None)
    of_silos = [figures.silos(found), *figures.served(evaluations, personal, modalities, worst)]
    of_silos += [] if data is None else [figures.holdings(data, modalities)]
    return render(
        "report.html.jinja",
        title=f"{summary.scenario}: {summary.method}",
        headline=headline(summary, untrained),
        answers=answers(summary, evaluations, scenario, facts),
        remarks=_remarks(summary),
        about=" ".join(
            [_about(summary, scenario, facts), *([f"About the data: {'; '.join(notes)}."] if notes else [])]
        ),
        curves=figures.curves(evaluations, merges, personal, custom, facts.bytes_at, clock),
        examples=[] if data is None else figures.examples(data),
        gallery_items=0 if data is None else data.items,
        losses=figures.losses(merges, modalities, worst),
        silos=[each for each in of_silos if each is not None],
        silo_table=_silo_table(summary, found, facts),
        timeline=timeline(facts, merges, list(summary.per_silo), clock),
        logged=summary.messages.logged,
        weights=figures.reported(merges, modalities, captions),
        staleness=figures.staleness(merges),
        traffic=figures.traffic(summary),
        space=None if data is None else figures.space(data.before, data.after),
        left=_left(logged.sent, summary),
        protection=scenario.privacy.in_words,
        metrics=_metric_table(summary, untrained, custom),
        items_each=items_each(summary),
        fairness=[(name, f"{value:.4f}", _title(name)) for name, value in summary.fairness.items()],
        seconds=[(phase, f"{found:,.1f}") for phase, found in summary.seconds.plain().items() if found is not None],
        resumed=facts.resumed,
        digests=_digests(summary),
        scenario_text=read_regular(folder.scenario, "a run's scenario").decode("utf-8", "replace"),
    )


def _data_of(folder: RunFolder, summary: RunSummary) -> ReportData | None:
    path = folder.root / "report_data.json"
    if not path.is_file():
        return None
    data = read_json(path, ReportData, "the images and projections of a report; delete it to do without")
    return data if data.model_digest == summary.model_digest else None


def headline(summary: RunSummary, first: Mapping[str, float]) -> str:
    """The result in one sentence: the headline metric before and after training."""
    before, after = first.get(HEADLINE), summary.metrics.get(HEADLINE)
    rounds = counted(summary.versions, "round")
    if summary.versions in summary.unevaluated:
        return f"{summary.method} trained for {rounds}; the evaluator did not answer, so the result is not evaluated"
    if before is None or after is None:
        return f"{summary.method} trained for {rounds}"
    gallery = gallery_of(summary)
    items = "" if gallery is None else f", on {gallery.items}"
    if after == before:
        return f"{summary.method}: R@1 {after:.3f} before and after {rounds}{items}"
    error = 0.0 if gallery is None else gallery.uncertainty((before + after) / 2)
    if abs(after - before) <= error:
        change = f"R@1 {before:.3f} before and {after:.3f} after {rounds}"
        return f"{summary.method}: {change}, no more than the standard error of {error:.2g}{items}"
    word = "improved" if after > before else "worsened"
    return f"{summary.method} {word} retrieval from R@1 {before:.3f} to {after:.3f} in {rounds}{items}"


def _remarks(summary: RunSummary) -> list[str]:
    """What limits the meaning of the result, as the terminal shows it."""
    gallery = gallery_of(summary)
    coarse = [] if gallery is None else gallery.remarks(summary.metrics)
    return [*coarse, *chosen_by_validation(summary), *items_left_out(summary), *training_warnings(summary)]


def _about(summary: RunSummary, scenario: Scenario, facts: LogFacts) -> str:
    """What was run, when, and on what, in one paragraph."""
    when = ""
    if facts.began:
        when = f"Run on {datetime.fromisoformat(facts.began):%d %B %Y, %H:%M UTC}. "
    made = ", ".join(f"{name} {version}" for name, version in summary.versions_of.items())
    part = scenario.partition
    data = "each silo has its own" if scenario.data is None else scenario.data.name
    missing = sum(len(silo.modalities) == 1 for silo in summary.per_silo.values())
    lacking = f", {missing} of which lack a modality" if missing else ""
    rate = scenario.participation.rate
    who = "all silos" if rate == 1 else f"{rate:.0%} of the silos"
    noise = scenario.privacy.noise_multiplier
    private = f" Updates are clipped and noised (multiplier {noise})." if noise else ""
    more = " (incomplete as the run was resumed)" * facts.resumed
    if summary.seconds.virtual is not None:
        more += f", {summary.seconds.virtual:.0f} s of virtual time, simulated from the scenario's cost"
    faults = f" Scripted: {counted(len(scenario.faults), 'fault')}." if scenario.faults else ""
    return (
        f"{when}Method {summary.method}, seed {summary.seed}, on {len(summary.per_silo)} silos{lacking}. "
        f"Data: {data}, partition {part.kind}; backbone {scenario.backbone.name}; "
        f"each round selects {who}; aggregation is {scenario.aggregation.mode}.{private}{faults} "
        f"It took {summary.seconds.total:.0f} s{more}. Made with {made}."
    )


def _silo_table(summary: RunSummary, found: Mapping[str, SiloResult], facts: LogFacts) -> list[tuple[str | int, ...]]:
    rows: list[tuple[str | int, ...]] = []
    for name, silo in summary.per_silo.items():
        result, bounds = found.get(name), "-"
        if result is not None:
            bounds = "{:.2f} to {:.2f}".format(*result.interval)
        rows.append(
            (
                name,
                " + ".join(silo.modalities),
                f"{silo.samples:,}",
                result.items if result is not None else "-",
                silo.participations,
                _shown(None if result is None else result.before),
                _shown(None if result is None else result.after),
                bounds,
                *(size_text(sum(table[name].values())) for table in (facts.up, facts.down) if summary.messages.logged),
            )
        )
    return rows


def _left(sent: SentPayloads, summary: RunSummary) -> list[tuple[str | int, ...]]:
    """What left the silos, as ``fedmq audit`` counts it: by kind; without logs only the sizes."""
    if not summary.messages.logged:
        return [(kind.replace("_", " "), size_text(size)) for kind, size in sorted(summary.bytes.up.items())]
    silos = [name for name in sent.number if name not in (COORDINATOR, EVALUATOR)]
    rows: list[tuple[str | int, ...]] = []
    for kind in sorted({kind for name in silos for kind in sent.number[name]}):
        counts = [sent.number[name][kind] for name in silos if sent.number[name][kind]]
        size = sum(sent.bytes[name][kind] for name in silos)
        rows.append((kind.replace("_", " "), len(counts), f"{sum(counts):,}", tensor_text(size)))
    return rows


def _metric_table(
    summary: RunSummary, first: Mapping[str, float], custom: tuple[Metric, ...]
) -> list[tuple[str, str, str, str]]:
    nan, gallery = float("nan"), gallery_of(summary)
    return [
        (name, "-", "-", f"{_title(name, custom)}: 1 for every model")
        if gallery is not None and gallery.certain(name)
        else (name, f"{first.get(name, nan):.4f}", f"{value:.4f}", _title(name, custom))
        for name, value in summary.metrics.items()
    ]


def _digests(summary: RunSummary) -> list[tuple[str, str]]:
    found = [("model", summary.model_digest)]
    if summary.data_digest is not None:
        found.append(("data", summary.data_digest))
    return [*found, *summary.released_with.items()]


def _title(name: str, custom: tuple[Metric, ...] = ()) -> str:
    """Title of a metric; empty for metrics that this version of fedmq does not know."""
    return metric_of(name, custom).title if is_known(name, custom) else ""


# ------------------------------------------------------------------------------------------------------ first screen
#: Silos below their start that are told in full.
_TOLD = 3
#: Difference of two recalls that shows at three digits.
_VISIBLE = 0.0005


def silo_results(summary: RunSummary, evaluations: Sequence[EvaluationLine]) -> dict[str, SiloResult]:
    """R@1 of each silo that has held-out items, before and after training."""
    first = evaluations[0].per_silo if evaluations else {}
    own = summary.own_heldout.per_silo if summary.own_heldout is not None and summary.evaluated is None else {}
    return {
        name: SiloResult(
            tuple(sorted(silo.modalities)),
            own[name].items if name in own else silo.heldout - silo.image_only - silo.text_only,
            first.get(name, {}).get(HEADLINE),
            silo.figures[HEADLINE],
        )
        for name, silo in summary.per_silo.items()
        if HEADLINE in silo.figures
    }


#: A question of the first screen, its answer in large print, and the lines below.
Answer = tuple[str, str, list[str]]


def answers(
    summary: RunSummary, evaluations: Sequence[EvaluationLine], scenario: Scenario, facts: LogFacts
) -> list[Answer]:
    """The first screen: did it work, who is left behind, what left the sites, and what failed."""
    behind = _left_behind(silo_results(summary, evaluations))
    return [_worked(summary, evaluations), behind, _sent(summary, scenario), _failures(summary, facts)]


def _worked(summary: RunSummary, evaluations: Sequence[EvaluationLine]) -> Answer:
    question, gallery = "Did it work?", gallery_of(summary)
    course = {line.version: line.metrics[HEADLINE] for line in evaluations if HEADLINE in line.metrics}
    after = summary.metrics.get(HEADLINE)
    lines = []
    if HEADLINE in summary.personal:
        lines.append(f"Personal models: R@1 {summary.personal[HEADLINE]:.3f}, mean over silos.")
    if after is None or not course:
        return question, "not evaluated", lines
    if gallery is not None:
        ends = (interval(value, round(0.5 / gallery.step)) for value in (course[min(course)], after))
        before, now = (f"{low:.3f} to {high:.3f}" for low, high in ends)
        lines.insert(0, f"95 % intervals: {before} before, {now} after, on {gallery.items}.")
    peak = max(course, key=lambda version: course[version])
    if course[peak] - after >= _VISIBLE:
        lines.insert(0, f"Peak {course[peak]:.3f} in round {peak}; the end is {course[peak] - after:.3f} below it.")
    return question, f"R@1 {course[min(course)]:.3f} → {after:.3f}", lines


def _left_behind(found: Mapping[str, SiloResult]) -> Answer:
    question = "Who is left behind?"
    if not found:
        return question, "not measured", ["No silo has held-out items with both modalities."]

    def told(name: str) -> str:
        silo, (low, high) = found[name], found[name].interval
        before = "" if silo.before is None else f"{silo.before:.3f} → "
        return f"{name}: {before}{silo.after:.3f}, {counted(silo.items, 'item')}, 95 % interval {low:.2f} to {high:.2f}"

    drops = {name: silo.before - silo.after for name, silo in found.items() if silo.before is not None}
    worse = sorted((name for name, drop in drops.items() if drop > 0), key=lambda name: -drops[name])
    clear = [name for name in worse if (found[name].before or 0.0) > found[name].interval[1]]
    lowest = min(found, key=lambda name: found[name].after)
    lines = [f"{told(name)}." for name in worse[:_TOLD]]
    if len(worse) > _TOLD:
        lines.append(f"{len(worse) - _TOLD} more: {first_few(worse[_TOLD:])}.")
    if worse:
        lines.append(f"Start above the end's interval: {name_some(clear) if clear else 'none of them'}.")
    if lowest not in worse[:_TOLD]:
        lines.append(f"Lowest: {told(lowest)}.")
    if not drops:
        return question, "no value before training", lines
    return question, f"{len(worse) or 'none'} of {counted(len(drops), 'silo')} ended below the start", lines


def _by_kind(sizes: Mapping[str, int], decoded: Mapping[str, int]) -> str:
    kinds = sorted(sizes, key=lambda kind: -sizes[kind])
    whole = {kind: f" ({size_text(size)} decoded)" for kind, size in decoded.items()}
    shown = (f"{kind.replace('_', ' ')} {size_text(sizes[kind])}{whole.get(kind, '')}" for kind in kinds)
    return ", ".join(shown) or "nothing"


def _sent(summary: RunSummary, scenario: Scenario) -> Answer:
    up, down = summary.bytes.up, summary.bytes.down
    by_kind = _by_kind(up, summary.bytes.decoded_up), _by_kind(down, summary.bytes.decoded_down)
    lines = [f"Up: {by_kind[0]}.", f"Down: {by_kind[1]}.", scenario.privacy.in_words]
    return "What left the sites?", f"{size_text(sum(up.values()))} up, {size_text(sum(down.values()))} down", lines


def _failures(summary: RunSummary, facts: LogFacts) -> Answer:
    tasks, refused = summary.tasks, summary.messages.refused
    given = tasks.merged + tasks.failed + tasks.discarded
    lines = [
        f"{tasks.merged:,} of {counted(given, 'task')} merged, {tasks.failed} failed, {tasks.discarded} discarded."
    ]
    if refused:
        lines.append(f"{counted(refused, 'message')} refused.")
    if summary.unusable_replies:
        lines.append(f"Refused replies or errors: {name_some(list(summary.unusable_replies))}.")
    if happened := incidents_text(facts):
        lines.append(f"{happened}.")
    told = list(unsummed(facts))
    lines += told[:_TOLD]
    if len(told) > _TOLD:
        lines.append(f"{len(told) - _TOLD} more of this kind: fedmq audit --verbose.")
    if summary.unevaluated:
        lines.append(f"{counted(len(summary.unevaluated), 'evaluation')} without an answer.")
    bad = tasks.failed + tasks.discarded
    parts = [counted(bad, "task")] if bad else []
    parts += [counted(refused, "message")] if refused else []
    return "What failed or was refused?", " and ".join(parts) or "no task, no message", lines


# ------------------------------------------------------------------------------------------------------ several runs
#: Metrics that have a figure: those of the short display, and fairness.
_CURVES = (*BRIEF, "map")
#: Digest at the end of the name of a run of a comparison.
_DIGEST = re.compile("[0-9a-f]{12}")


@dataclass(frozen=True)
class _RunOfSeveral:
    name: str
    summary: RunSummary
    evaluations: tuple[EvaluationLine, ...]
    merges: tuple[MergeLine, ...]

    @property
    def metrics(self) -> dict[str, float]:
        """Of the summary, without recalls that every model reaches in so small a gallery."""
        return meaningful(self.summary.metrics, gallery_of(self.summary))


def side_by_side(folders: Sequence[RunFolder]) -> str:
    """The page of several runs.

    Raises:
        InputError: a run is not finished, or its files are invalid.
    """
    runs = [_read_one(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    columns = list(dict.fromkeys(name for run in runs for name in run.metrics))
    rows = [
        (_title(name) or name, *(f"{run.metrics[name]:.4f}" if name in run.metrics else "-" for run in runs))
        for name in columns
    ]
    facts = [
        ("R@1", *(_shown(run.metrics.get(HEADLINE)) for run in runs)),
        ("method", *(run.summary.method for run in runs)),
        ("seed", *(str(run.summary.seed) for run in runs)),
        ("rounds", *(str(run.summary.versions) for run in runs)),
        ("silos", *(str(len(run.summary.per_silo)) for run in runs)),
        ("R@1 of the worst-served silo", *(_shown(run.summary.fairness.get("worst_r1")) for run in runs)),
        ("payload from the silos", *(size_text(sum(run.summary.bytes.up.values())) for run in runs)),
        ("payload to the silos", *(size_text(sum(run.summary.bytes.down.values())) for run in runs)),
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
        settings=_differing(folders),
        figures=[_curve_of(runs, name) for name in _CURVES if any(name in run.metrics for run in runs)]
        + [_losses_of(runs), _silos_of(runs)],
    )


def _names(folders: Sequence[RunFolder]) -> list[str]:
    """The folders' names without what all have in common, and without the digest of a comparison's run."""
    full = [folder.root.resolve().name for folder in folders]
    parts = [name.split("-") for name in full]
    common = sum(1 for _ in takewhile(lambda each: len({*each}) == 1, zip(*parts, strict=False)))
    short = ["-".join(each[common:]).removesuffix("-" + each[-1] * bool(_DIGEST.fullmatch(each[-1]))) for each in parts]
    return short if len({*short}) == len(full) and all(short) else full


def _read_one(folder: RunFolder, name: str) -> _RunOfSeveral:
    lines = read_metrics(folder)
    evaluations = tuple(shared_evaluations(lines))
    merges = tuple(line for line in lines if isinstance(line, MergeLine))
    return _RunOfSeveral(name, with_own_figures(read_summary(folder)), evaluations, merges)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _curve_of(runs: Sequence[_RunOfSeveral], metric: str) -> Figure:
    heading = metric_of(metric).heading if is_known(metric) else metric
    figure = Figure(_title(metric), "round", heading, note="On the whole held-out split of each run.")
    for place, run in enumerate(runs):
        lines = run.evaluations if metric in run.metrics else ()
        _draw(figure, place, run, {line.version: line.metrics[metric] for line in lines if metric in line.metrics})
    return figure


def _losses_of(runs: Sequence[_RunOfSeveral]) -> Figure:
    figure = Figure("Training loss", "round", "loss", note="Losses of different methods are not comparable.")
    for place, run in enumerate(runs):
        _draw(figure, place, run, {line.version: line.loss for line in run.merges if line.loss})
    return figure


def _draw(figure: Figure, place: int, run: _RunOfSeveral, known: Mapping[int, float]) -> None:
    figures.draw_noisy(figure, list(known), list(known.values()), run.name, COLOURS[place % len(COLOURS)])


def _silos_of(runs: Sequence[_RunOfSeveral]) -> Figure:
    note = "R@1 of the shared model with its 95 % interval; the queries are each silo's own held-out items."
    names = list(dict.fromkeys(name for run in runs for name in run.summary.per_silo))
    figure = Figure("Retrieval for each silo", "R@1", "", 12 * len(runs) * len(names) + 130, note)
    figure.layout["scattermode"] = "group"
    for place, run in enumerate(runs):
        found = silo_results(run.summary, run.evaluations)
        after = [silo.after for silo in found.values()]
        plus = [silo.interval[1] - silo.after for silo in found.values()]
        minus = [silo.after - silo.interval[0] for silo in found.values()]
        error = {"array": plus, "arrayminus": minus, "thickness": 1, "width": 2}
        more = {"name": run.name, "marker": {"color": colour(place)}, "orientation": "h"}
        figure.draw("scatter", x=after, y=list(found), mode="markers", error_x=error, **more)
    figure.y |= {"type": "category", "autorange": "reversed", "dtick": 1}
    return figure


def _differing(folders: Sequence[RunFolder]) -> list[tuple[str, ...]]:
    """The settings that differ between runs: key and its value in each."""
    settings = [flat(load(folder.scenario).model_dump(mode="json")) for folder in folders]
    keys = dict.fromkeys(key for each in settings for key in each)
    shared = [key for key in keys if not key.startswith("protocol.") or all(key in each for each in settings)]
    found = [(key, *(str(each.get(key, "-")) for each in settings)) for key in shared]
    return [row for row in found if len(set(row[1:])) > 1]
