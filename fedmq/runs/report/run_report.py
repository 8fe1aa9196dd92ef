"""The report of a run: its result in words, figures, examples and tables on one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from fedmq.config.resolve import load
from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.evaluation.metrics import Metric, is_known, metric_of
from fedmq.evaluation.recall import HEADLINE
from fedmq.runs.report import figures
from fedmq.runs.report.data import ReportData
from fedmq.runs.report.html import Figure, render
from fedmq.runs.report.logs import RUN_TIME, VIRTUAL_TIME, LogFacts, LoggedFacts, read_logs, timeline
from fedmq.runs.result_limits import chosen_by_validation, gallery_of, items_left_out, meaningful, training_warnings
from fedmq.runs.results import read_metrics, read_summary, shared_evaluations, with_own_figures
from fedmq.runs.run_records import MergeLine, PersonalLine, RunSummary, SiloSummary
from fedmq.storage.json_files import read_json
from fedmq.storage.regular_files import read_regular
from fedmq.storage.run_folder import RunFolder, write_text
from fedmq.text import counted, size_text
from fedmq.wire.log_records import SentPayloads
from fedmq.wire.messages import COORDINATOR, EVALUATOR

if TYPE_CHECKING:
    from fedmq.federation.protocol import ReportedValue


def write(folder: RunFolder, captions: Mapping[str, ReportedValue], logged: LoggedFacts | None = None) -> None:
    """Write ``report.html`` from the run's records and, where they exist, ``report_data.json`` and the message logs.

    Args:
        folder: folder of a finished run.
        captions: how to show the values that the method reports of its merges.
        logged: what its logs show; None reads them, and leaves out damaged lines.

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
    facts = logged.course
    scenario, custom = load(folder.scenario), tuple(summary.custom_metrics.values())
    clock = RUN_TIME if summary.seconds.virtual is None else VIRTUAL_TIME
    modalities = {name: silo.modalities for name, silo in summary.per_silo.items()}
    page = render(
        "report.html.jinja",
        title=f"{summary.scenario}: {summary.method}",
        headline=headline(summary, untrained),
        facts=_facts(summary, resumed=facts.resumed),
        remarks=_remarks(summary, untrained),
        about=_about(summary, scenario, facts),
        curves=figures.curves(evaluations, merges, personal, custom, facts.bytes_at, clock),
        examples=[] if data is None else figures.examples(data),
        gallery_items=0 if data is None else data.items,
        silos=[*_silo_figures(summary, data, modalities), figures.spread(evaluations, personal)],
        silo_table=_silo_table(summary),
        timeline=timeline(facts, list(summary.per_silo), clock),
        weights=figures.reported(merges, modalities, captions),
        staleness=figures.staleness(merges),
        traffic=figures.traffic(facts, summary),
        spaces=_spaces(data),
        privacy=_privacy(logged.sent, summary, scenario),
        metrics=_metric_table(summary, untrained, custom),
        fairness=[(name, f"{value:.4f}", _title(name)) for name, value in summary.fairness.items()],
        seconds=[(phase, f"{found:,.1f}") for phase, found in summary.seconds.plain().items() if found is not None],
        resumed=facts.resumed,
        digests=_digests(summary),
        scenario_text=read_regular(folder.scenario, "a run's scenario").decode("utf-8", "replace"),
    )
    write_text(folder.report, page)


def _data_of(folder: RunFolder, summary: RunSummary) -> ReportData | None:
    path = folder.root / "report_data.json"
    if not path.is_file():
        return None
    data = read_json(path, ReportData, "the images and projections of a report; delete it to do without")
    return data if data.model_digest == summary.model_digest else None


def headline(summary: RunSummary, first: Mapping[str, float]) -> str:
    """The result in one sentence: the headline metric before and after training.

    Args:
        summary: summary of the run.
        first: metrics of the untrained model.
    """
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


def _remarks(summary: RunSummary, untrained: Mapping[str, float]) -> list[str]:
    """What limits the meaning of the result, as the terminal shows it."""
    gallery = gallery_of(summary)
    coarse = [] if gallery is None else gallery.remarks(summary.metrics)
    return [*coarse, *chosen_by_validation(summary), *items_left_out(summary), *training_warnings(summary, untrained)]


def _facts(summary: RunSummary, *, resumed: bool) -> list[tuple[str, str]]:
    """Figures in large print: value and what it is."""
    single = sum(len(silo.modalities) == 1 for silo in summary.per_silo.values())
    size, gallery = size_text(sum(summary.bytes.up.values()) + sum(summary.bytes.down.values())), gallery_of(summary)
    known = meaningful(summary.metrics, gallery)
    found = [(f"{known[name]:.3f}", metric_of(name).title) for name in ("mean_r1", "map") if name in known]
    if gallery is not None:
        found.append((f"{gallery.images:,}", f"items in the gallery ({gallery.items})"))
    found += [
        (str(len(summary.per_silo)), f"silos, {single} of them with one modality"),
        (str(summary.versions), "rounds"),
        (size, "exchanged in both directions"),
        (f"{summary.seconds.total:.0f} s", "real time" + ", incomplete as the run was resumed" * resumed),
    ]
    if summary.seconds.virtual is not None:
        found.append((f"{summary.seconds.virtual:.0f} s", "virtual time, simulated from the scenario's cost"))
    if "worst_r1" in summary.fairness:
        found.append((f"{summary.fairness['worst_r1']:.3f}", "R@1 of the worst-served silo"))
    return found


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
    faults = f" {len(scenario.faults)} faults are scripted." if scenario.faults else ""
    return (
        f"{when}Method {summary.method}, seed {summary.seed}, on {len(summary.per_silo)} silos{lacking}. "
        f"Data: {data}, partition {part.kind}; backbone {scenario.backbone.name}; "
        f"each round selects {who}; aggregation is {scenario.aggregation.mode}.{private}{faults} Made with {made}."
    )


def _silo_figures(
    summary: RunSummary, data: ReportData | None, modalities: Mapping[str, Sequence[str]]
) -> list[Figure]:
    held = None if data is None else figures.holdings(data, modalities)
    return [*([held] if held else []), *figures.silos(summary)]


def _headline(silo: SiloSummary) -> str:
    """The headline metric of a silo; a dash if it has no held-out items with both modalities."""
    return f"{silo.figures[HEADLINE]:.4f}" if HEADLINE in silo.figures else "-"


def _silo_table(summary: RunSummary) -> list[tuple[str, str, str, int, str]]:
    return [
        (name, " + ".join(silo.modalities), f"{silo.samples:,}", silo.participations, _headline(silo))
        for name, silo in summary.per_silo.items()
    ]


def _spaces(data: ReportData | None) -> list[Figure]:
    if data is None:
        return []
    titled = (("The shared space before training", data.before), ("The shared space after training", data.after))
    return [figures.space(title, found) for title, found in titled if found is not None]


def _left(sent: SentPayloads, summary: RunSummary) -> list[tuple[str, int | str, str, str]]:
    """What left the silos, as ``fedmq audit`` counts it: kind, number of silos, number of payloads, tensor bytes."""
    if not summary.messages.logged:
        return [(kind.replace("_", " "), "", "", size_text(size)) for kind, size in sorted(summary.bytes.up.items())]
    silos = [name for name in sent.number if name not in (COORDINATOR, EVALUATOR)]
    rows: list[tuple[str, int | str, str, str]] = []
    for kind in sorted({kind for name in silos for kind in sent.number[name]}):
        counts = [sent.number[name][kind] for name in silos if sent.number[name][kind]]
        size = sum(sent.bytes[name][kind] for name in silos)
        rows.append(
            (kind.replace("_", " "), len(counts), f"{sum(counts):,}", size_text(size) if size else "numbers only")
        )
    return rows


def _privacy(sent: SentPayloads, summary: RunSummary, scenario: Scenario) -> dict[str, object]:
    """What left the silos, and what protects it."""
    privacy = scenario.privacy
    if privacy.clip_norm is None:
        protection = "Updates were neither clipped nor noised: the coordinator saw them as the silos computed them."
    elif not privacy.noise_multiplier:
        protection = f"Updates were clipped to norm {privacy.clip_norm}, without noise: there is no formal guarantee."
    else:
        source = (
            "each silo's private key" if privacy.noise_from == "key" else "the scenario's seed, which anyone may know"
        )
        protection = (
            f"Updates were clipped to norm {privacy.clip_norm} and noised (multiplier {privacy.noise_multiplier}); "
            f"the noise comes from {source}. fedmq audit computes epsilon."
        )
    return {"sent": _left(sent, summary), "protection": protection, "logged": summary.messages.logged}


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
