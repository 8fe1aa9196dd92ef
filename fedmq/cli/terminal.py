"""What a run looks like in a terminal: progress while it runs, tables when it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Column, Table

from fedmq.audit.log_checks import Audit
from fedmq.config.scenario import Scenario
from fedmq.evaluation.metrics import BRIEF, WAYS, Metric, metric_of, shown
from fedmq.evaluation.user_metrics import measures_of, own_metrics
from fedmq.runs.run_records import RunSummary
from fedmq.runs.status import Status
from fedmq.storage.run_folder import RunFolder
from fedmq.text import printable
from fedmq.wire.messages import EVALUATOR

_PLAIN_SECONDS = 10.0
#: Until it is told whom a run waits for, and then that it waits for others [s].
_GATHERING_SECONDS = 2.0
#: Silos that are named one by one.
_MANY = 5
_SHOWN = 160  # characters of a refusal


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def _left(status: Status, first: tuple[int, float] | None) -> str:
    if first is None or status.round <= first[0]:
        return "-"
    pace = (status.elapsed - first[1]) / (status.round - first[0])
    seconds = pace * (status.rounds - status.round)
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def name_some(names: Sequence[str]) -> str:
    """``silo-02, silo-03 and the evaluator``; of many the first few and how many more."""
    told = ["the evaluator" if name == EVALUATOR else name for name in names]
    if len(told) > _MANY:
        return f"{', '.join(told[:_MANY])} and {len(told) - _MANY} more"
    return " and ".join(filter(None, [", ".join(told[:-1]), *told[-1:]]))


def _refused(status: Status) -> str:
    """How many messages and why, and what of the last one: whoever starts silos by hand learns it here first."""
    reasons, last = status.refused
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    last = printable(last)
    return f"{counts}; the last of {last if len(last) <= _SHOWN else f'{last[:_SHOWN]}...'}"


def _line(status: Status, left: str) -> str:
    refused = f"  refused: {_refused(status)}" if any(status.refused) else ""
    if status.phase == "gathering" and status.missing:
        return f"waiting for {name_some(status.missing)}{refused}"
    loss = "-" if status.loss is None else f"{status.loss:.3f}"
    recall = ", ".join(
        f"{metric_of(name).heading} {status.metrics[name]:.3f}" for name in BRIEF if name in status.metrics
    )
    return (
        f"round {status.round}/{status.rounds}  silos: {status.training} training, "
        f"{status.online - status.training if status.online > status.training else 0} waiting, {status.lost} lost  "
        f"loss {loss}  {recall or 'recall -'}  {_bytes(status.bytes)}  left {left}{refused}"
    )


def status_table(status: Status, left: str, title: str, own: Sequence[Metric] = ()) -> Table:
    """How a run stands, for a terminal that is kept up to date.

    Args:
        status: as the coordinator tells it.
        left: the time left, as shown.
        title: of the run.
        own: entries of the user's own metrics.
    """
    table = Table.grid(padding=(0, 2))
    table.add_row(
        f"[bold]{title}[/bold]", ProgressBar(total=status.rounds, completed=status.round, width=40), f"left {left}"
    )
    loss = "-" if status.loss is None else f"{status.loss:.4f}"
    waiting = max(0, status.online - status.training)
    table.add_row("round", f"{status.round} of {status.rounds}", f"{status.phase}, {status.elapsed:.0f} s")
    table.add_row("silos", f"{status.training} training, {waiting} waiting, {status.lost} lost", f"loss {loss}")
    measured = "  ".join(
        f"{metric.heading} {status.metrics[metric.name]:.3f}"
        for metric in shown(status.metrics, own)
        if metric.way in ("", "mean")
    )
    table.add_row("metrics", measured or "not measured yet", _bytes(status.bytes))
    if status.phase == "gathering" and status.missing:
        table.add_row("waiting for", name_some(status.missing))
    if any(status.refused):
        table.add_row("refused", escape(_refused(status)))
    return table


@contextmanager
def display(scenario: Scenario, console: Console, *, quiet: bool) -> Iterator[Callable[[Status], None]]:
    """A live display; gives the function to tell it how things stand.

    Args:
        scenario: for the title.
        console: where to show it; plain lines every ten seconds if it is no terminal.
        quiet: show nothing.
    """
    if quiet:
        yield lambda _: None
        return
    if scenario.faults and scenario.clock == "wall":
        console.print("wall clock: the faults are real, but this run cannot be replayed", highlight=False)
    title = f"{scenario.name} ({scenario.protocol.label}, {scenario.silos.count} silos, seed {scenario.seed})"
    first: list[tuple[int, float]] = []
    if not console.is_terminal or console.is_dumb_terminal:
        console.print(title, highlight=False)
        told, ended = [0.0], list[bool]()
        waited: list[tuple[str, ...]] = [()]  # for whom, as told last

        def plain(status: Status) -> None:
            if not first and status.phase != "gathering":
                first.append((status.round, status.elapsed))
                told[0] = -_PLAIN_SECONDS  # all are here: that is told at once
            last = status.round == status.rounds and not ended
            others = status.phase == "gathering" and status.missing != waited[0]
            if status.elapsed - told[0] >= (_GATHERING_SECONDS if others else _PLAIN_SECONDS) or last:
                told[0], waited[0] = status.elapsed, status.missing
                if last:
                    ended.append(True)
                line = _line(status, _left(status, first[0] if first else None))
                console.print(line, highlight=False, markup=False, soft_wrap=True)

        yield plain
        return
    own = own_metrics(measures_of(scenario.evaluation))
    with Live(f"{title}: starting the silos", console=console, refresh_per_second=5, transient=True) as live:

        def update(status: Status) -> None:
            if not first and status.phase != "gathering":
                first.append((status.round, status.elapsed))
            live.update(status_table(status, _left(status, first[0] if first else None), title, own))

        yield update


def _results(models: Sequence[tuple[str, Mapping[str, float]]], own: Sequence[Metric], title: str) -> Table:
    """Metrics by way of retrieval: a row for each way and model, a column for each metric."""
    columns: dict[str, dict[str, str]] = {}
    for metric in shown(models[0][1], own):
        if metric.way:
            columns.setdefault(metric.heading, {})[metric.way] = metric.name
    table = Table("", *columns, title=title)
    ways = [way for way in WAYS if any(way in names for names in columns.values())]
    for whose, measured in models:
        for way in ways:
            cells = (f"{measured[names[way]]:.4f}" if way in names else "-" for names in columns.values())
            table.add_row(whose + WAYS[way], *cells)
    return table


def print_summary(summary: RunSummary, folder: RunFolder, console: Console) -> None:
    """What a run came to, and where to look further."""
    own = tuple(summary.own_metrics.values())
    models = [("", summary.metrics)] + ([("own models, ", summary.personal)] if summary.personal else [])
    console.print(_results(models, own, escape(f"{summary.scenario}: {summary.protocol}, seed {summary.seed}")))
    for metric in shown(summary.metrics, own):
        if not metric.way:
            values = ", ".join(f"{whose}{measured[metric.name]:.4f}" for whose, measured in models)
            console.print(f"{metric.title}: {values}", highlight=False, markup=False, soft_wrap=True)
    fairness, seconds, traffic, tasks = summary.fairness, summary.seconds, summary.bytes, summary.tasks
    lost = f"tasks: {tasks.merged} merged, {tasks.failed} failed, {tasks.discarded} discarded\n"
    console.print(
        f"over silos: R@1 std {fairness['std_r1']:.4f}, worst {fairness['worst_r1']:.4f}, "
        f"gap {fairness['gap_r1']:.4f}\n"
        f"traffic: {_bytes(sum(traffic.up.values()))} up, {_bytes(sum(traffic.down.values()))} down, "
        f"{summary.messages.refused} messages refused\n"
        f"{lost if tasks.failed or tasks.discarded else ''}"
        f"time: {seconds.total:.1f} s ({seconds.startup:.1f} s until all silos were ready), "
        f"memory of all processes {summary.processes.peak_pss_mb:.0f} MB\n"
        f"model digest {summary.model_digest}\n"
        f"run folder {folder.root}: report.html to look at"
        + (f", fedmq audit {folder.root} to check the message logs" if summary.messages.logged else ""),
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    for silo, why in summary.personal_missing.items():
        console.print(
            f"{silo}: its own model was not measured, and counts in no mean over silos: {printable(why)}",
            style="yellow",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    if summary.unchanged:
        console.print(
            "the model is the one the run began with, to the bit: no silo's update changed it. Silos that have nothing "
            "to train on send zeros; `loss` in metrics.jsonl says whether any of them trained",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )


def print_audit(audit: Audit, console: Console) -> None:
    """What the logs show."""
    whose = Column("process", no_wrap=True)
    table = Table(whose, "records", "bytes of frames sent", "payloads that left it [bytes]", "refused")
    for process in sorted(audit.records):
        left = ", ".join(f"{kind} {size:,}" for kind, size in sorted(audit.left.get(process, {}).items()))
        refused = ", ".join(f"{reason} {count}" for reason, count in sorted(audit.refused.get(process, {}).items()))
        name, left, refused = (escape(printable(text)) for text in (process, left, refused))  # a log may say anything
        table.add_row(name, f"{audit.records[process]:,}", f"{audit.frames[process]:,}", left or "-", refused or "-")
    console.print(table)
    if audit.undelivered:
        console.print(
            f"{audit.undelivered} messages were sent and never taken: refused, or under way when a process ended",
            highlight=False,
        )
    if audit.written:
        console.print(
            f"{', '.join(map(printable, audit.written))}: being written now; "
            "what is sent while logs are read, one after the other, may show as a difference",
            style="yellow",
            highlight=False,
            markup=False,
        )
    if not audit.finished:
        console.print(
            "no summary.json: the run has not finished, or its logs were brought alone; nothing is known of its end",
            style="yellow",
            highlight=False,
        )
    for finding in audit.findings:
        place, what = escape(printable(finding.place)), escape(printable(finding.what))
        console.print(f"[red]{place}[/red]: {what}", highlight=False)
    verdict = (
        "the logs agree with themselves and with each other"
        if not audit.findings
        else f"{len(audit.findings)} differences"
    )
    console.print(verdict, style="green" if not audit.findings else "red", highlight=False)
