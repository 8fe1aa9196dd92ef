"""Terminal output of a run: progress while it runs, tables of its results."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from fedmq.cli.console import err, out
from fedmq.config.scenario import Scenario
from fedmq.evaluation.custom_metrics import custom_metrics, measures_of
from fedmq.evaluation.metrics import BRIEF, WAYS, Metric, metric_of, shown
from fedmq.evaluation.recall import HEADLINE, chance_std
from fedmq.launch.interrupts import FAILED
from fedmq.runs.results import (
    Gallery,
    chosen_by_validation,
    gallery_of,
    items_each,
    items_left_out,
    meaningful,
    name_some,
    own_gallery,
    training_warnings,
)
from fedmq.runs.run_records import RunSummary
from fedmq.runs.status import Status
from fedmq.storage.run_folder import RunFolder
from fedmq.text import counted, duration_text, first_few, print_json, printable, size_text
from fedmq.wire.log_records import last_head
from fedmq.wire.messages import COORDINATOR, EVALUATOR

_PLAIN_SECONDS = 10.0
#: Maximum interval between two equal lines on what the run waits for before its rounds; it doubles up to this one [s].
_LONGEST_SECONDS = 600.0
#: Time until the display names the processes that a run waits for, and until it updates the names [s].
_GATHERING_SECONDS = 2.0
#: Maximum number of names listed individually.
_MANY = 5
#: Maximum number of slow silos shown.
_SLOW_SHOWN = 3
#: Time after which a progress line no longer has the last refusal, and until it has its age [s].
_REFUSED_SECONDS, _FRESH_SECONDS = 60.0, 10.0
#: Maximum length of a refusal as shown [characters].
_SHOWN = 160
#: Width of the middle column of the live display, which then fits 80 columns.
_MIDDLE = 40
#: Whose model it is, for the row of a table; its metrics; and the items that it was evaluated on, if known.
_Evaluated = tuple[str, Mapping[str, float], Gallery | None]


def _eta(status: Status, first: tuple[int, float] | None) -> str:
    if first is None or status.round <= first[0]:
        return "-"
    pace = (status.elapsed - first[1]) / (status.round - first[0])
    return duration_text(pace * (status.rounds - status.round))


def _refused(status: Status) -> str:
    """Refused messages by reason, and the last refusal in detail, for users who launch silos manually.

    Empty if there was none in the last minute: its cause no longer lasts.
    """
    reasons, last = status.refused
    if not any(status.refused) or status.refused_ago > _REFUSED_SECONDS:
        return ""
    ago = f", {status.refused_ago:.0f} s ago" if status.refused_ago >= _FRESH_SECONDS else ""
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    last = printable(last)
    return f"{counts}; the last{ago}: {last if len(last) <= _SHOWN else f'{last[:_SHOWN]}...'}"


def waited_for(status: Status) -> str:
    """What the run waits for, with the names of silos; empty if the run is not delayed."""
    if status.phase == "gathering" and status.missing:
        enough = "" if status.minimum is None else f"; starts with {status.minimum} silos, joined: {status.online}"
        return f"{name_some(status.missing)}{enough}"
    slow = [
        f"{name_some([name])}, {'evaluating' if name == EVALUATOR else 'training'} for {took:.0f} s"
        + ("" if limit is None else f" (limit {limit:.0f} s)")
        for name, took, limit in status.slow[:_SLOW_SHOWN]
    ]
    if len(status.slow) > _SLOW_SHOWN:
        slow.append(f"{len(status.slow) - _SLOW_SHOWN} more")
    overdue = f"{name_some(status.overdue)}, without a reply within the limit" if status.overdue else ""
    return "; ".join(filter(None, [*slow, overdue]))


def _absent(status: Status) -> str:
    """The evaluator if it is not connected: the rounds continue without it, but the run cannot end."""
    gone = EVALUATOR in status.missing and status.phase not in ("gathering", "stopped")
    return name_some([EVALUATOR]) if gone else ""


def _of_round(status: Status) -> str:
    """The round of the metrics: the evaluator works in parallel with the rounds, so they may be of an earlier one."""
    return "" if status.metrics_round is None else f" (of round {status.metrics_round})"


def _line(status: Status, eta: str) -> str:
    refused = f"  refused: {text}" if (text := _refused(status)) else ""
    waiting = waited_for(status)
    if status.phase == "gathering" and waiting:
        return f"waiting for {waiting}{refused}"
    refused = f"  waiting for {waiting}{refused}" if waiting else refused
    refused = f"  not connected: {absent}{refused}" if (absent := _absent(status)) else refused
    loss = "-" if status.loss is None else f"{status.loss:.3f}"
    recall = ", ".join(
        f"{metric_of(name).heading} {status.metrics[name]:.3f}" for name in BRIEF if name in status.metrics
    )
    recall += _of_round(status)
    return (
        f"round {status.round}/{status.rounds}  silos: {status.training} training, "
        f"{status.online - status.training if status.online > status.training else 0} waiting, {status.lost} lost  "
        f"loss {loss}  {recall or 'recall -'}  {size_text(status.bytes)}  ETA {eta}{refused}"
    )


def status_table(status: Status, eta: str, title: str, custom: Sequence[Metric] = ()) -> Table:
    """Status of a run, for a live display."""
    table = Table.grid(padding=(0, 2))
    table.title, table.title_justify, table.title_style = f"[bold]{escape(title)}[/bold]", "left", ""
    loss = "-" if status.loss is None else f"{status.loss:.4f}"
    waiting = max(0, status.online - status.training)
    bar = ProgressBar(total=status.rounds, completed=status.round, width=_MIDDLE)
    table.add_row("round", f"{status.round} of {status.rounds}", f"{status.phase}, {status.elapsed:.0f} s")
    table.add_row("", bar, f"ETA {eta}")
    table.add_row("silos", f"{status.training} training, {waiting} waiting, {status.lost} lost", f"loss {loss}")
    measured = [
        f"{metric.heading} {status.metrics[metric.name]:.3f}"
        for metric in shown(status.metrics, custom)
        if metric.way in ("", "mean")
    ]
    table.add_row("metrics", _metrics(measured, _of_round(status)), size_text(status.bytes))
    if waiting_for := waited_for(status):
        table.add_row("waiting for", escape(waiting_for))
    if absent := _absent(status):
        table.add_row("not connected", absent)
    if refused := _refused(status):
        table.add_row("refused", escape(refused))
    return table


def _metrics(measured: Sequence[str], of_round: str) -> str:
    """Metrics in lines of the middle column; each name stays on the line of its value."""
    if not measured:
        return "not evaluated yet"
    lines = [measured[0]]
    for metric in (*measured[1:], *filter(None, [of_round.strip()])):
        if len(lines[-1]) + 2 + len(metric) <= _MIDDLE:
            lines[-1] += f"{' ' if metric.startswith('(') else '  '}{metric}"
        else:
            lines.append(metric)
    return "\n".join(lines)


def is_live(console: Console) -> bool:
    """Whether a display can move the cursor on a console."""
    return console.is_terminal and not console.is_dumb_terminal


@contextmanager
def display(
    scenario: Scenario, console: Console, *, quiet: bool, line: Callable[[str], object] | None = None
) -> Iterator[Callable[[Status], None]]:
    """A live display; yields the function that updates it.

    Args:
        scenario: scenario, for the title.
        console: where to show it; if it is not a terminal, plain lines every ten seconds.
        quiet: show nothing.
        line: prints a plain line; None prints it on the console.
    """
    show = line or partial(console.print, highlight=False, markup=False, soft_wrap=True)
    if quiet:
        yield lambda _: None
        return
    if scenario.faults and scenario.clock == "wall":
        console.print("wall clock: the faults are real, but this run cannot be replayed")
    title = f"{scenario.name} ({scenario.protocol.label}, {len(scenario.silo_names)} silos, seed {scenario.seed})"
    first: list[tuple[int, float]] = []
    if not is_live(console):
        show(title)
        printed_at, ended, interval = [0.0], list[bool](), [_PLAIN_SECONDS]
        waited: list[tuple[str, ...]] = [()]  # the missing processes that were last printed

        def plain(status: Status) -> None:
            if not first and status.phase != "gathering":
                first.append((status.round, status.elapsed))
                printed_at[0] = -_PLAIN_SECONDS  # all have joined: print it immediately
            last = status.round == status.rounds and not ended
            gathering = status.phase == "gathering"
            others = gathering and status.missing != waited[0]
            wait = _GATHERING_SECONDS if others else interval[0] if gathering else _PLAIN_SECONDS
            if status.elapsed - printed_at[0] >= wait or last:
                interval[0] = _PLAIN_SECONDS if others else min(2 * interval[0], _LONGEST_SECONDS)
                printed_at[0], waited[0] = status.elapsed, status.missing
                if last:
                    ended.append(True)
                show(_line(status, _eta(status, first[0] if first else None)))

        yield plain
        return
    custom = custom_metrics(measures_of(scenario.evaluation))
    with Live(f"{title}: starting the silos", console=console, refresh_per_second=5, transient=True) as live:

        def update(status: Status) -> None:
            if not first and status.phase != "gathering":
                first.append((status.round, status.elapsed))
            live.update(status_table(status, _eta(status, first[0] if first else None), title, custom))

        yield update


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a line, wrapped between words on a terminal and unwrapped in a file."""
    console.print(text, style=style, markup=False, soft_wrap=not console.is_terminal)


def _models(summary: RunSummary) -> list[_Evaluated]:
    """The evaluated models of a run: the shared one, the personal ones, and the shared one on silos' own items."""
    gallery = gallery_of(summary)
    models: list[_Evaluated] = [("", summary.metrics, gallery)] if summary.metrics else []
    if summary.personal:
        models.append(("personal models, ", summary.personal, gallery))
    heldout = summary.own_heldout
    if heldout is not None and heldout.metrics:
        models.append(("own held-out items, ", heldout.metrics, own_gallery(heldout)))
    return models


def _results(models: Sequence[_Evaluated], custom: Sequence[Metric], title: str) -> Table:
    """Table of metrics: a row per direction of retrieval and model, a column per metric."""
    columns: dict[str, dict[str, str]] = {}
    for metric in shown(models[0][1], custom):
        if metric.way:
            columns.setdefault(metric.heading, {})[metric.way] = metric.name
    items = "" if models[0][2] is None else f"\n{models[0][2].items}"
    table = Table("", *columns, title=title + items)
    ways = [way for way in WAYS if any(way in names for names in columns.values())]
    for whose, measured, gallery in models:
        known = meaningful(measured, gallery)
        for way in ways:
            cells = (f"{known[names[way]]:.4f}" if names.get(way) in known else "-" for names in columns.values())
            table.add_row(whose + WAYS[way], *cells)
    return table


def _fairness(summary: RunSummary) -> str:
    """The spread of R@1 over silos, and how much of it chance explains; empty if no silo was evaluated."""
    fairness = summary.fairness or ({} if summary.own_heldout is None else summary.own_heldout.fairness)
    if not fairness:
        return ""
    std, worst, gap = (fairness[f"{name}_r1"] for name in ("std", "worst", "gap"))
    line = f"R@1 over silos: std {std:.4f}, worst {worst:.4f}, gap {gap:.4f}{items_each(summary)}\n"
    found = [silo for silo in summary.per_silo.values() if silo.heldout and HEADLINE in silo.figures]
    if not found:
        return line
    mean = sum(silo.figures[HEADLINE] for silo in found) / len(found)
    chance = chance_std(mean, [silo.heldout for silo in found])
    return f"{line}std {chance:.4f} is expected by chance if the model is equally good for all silos\n"


def _privacy(summary: RunSummary) -> str:
    """The privacy that the silo with most tasks has spent, and a training item; empty without noise."""
    lines = ""
    for what, spent in (("privacy", summary.privacy), ("privacy of an item", summary.item_privacy)):
        if spent is not None:
            plain = f"; sent without noise: {', '.join(spent.without_noise)}" if spent.without_noise else ""
            epsilon = f"epsilon {spent.epsilon:.3g} at delta {spent.delta:g}"
            lines += f"{what}: {epsilon} after {counted(spent.tasks, 'task')} of a silo{plain}\n"
    return lines


def _failed_at(summary: RunSummary) -> str:
    """The silos with replies that could not be merged, those with most of them first."""
    counts = {name: replies.total for name, replies in summary.unusable_replies.items()}
    first = sorted(counts, key=lambda name: (-counts[name], name))
    return f" ({first_few([f'{name} {counts[name]}' for name in first], _MANY)})" if first else ""


def _audit(summary: RunSummary, folder: RunFolder) -> str:
    """The command that audits the run, with the folders of processes whose logs lie elsewhere; empty without logs."""
    if not summary.messages.logged:
        return ""
    command = f"fedmq audit {shlex.quote(str(folder.root))}"
    took_part = [name for name, silo in summary.per_silo.items() if silo.modalities]  # as a silo states them first
    took_part += [EVALUATOR] * (summary.evaluated is not None)
    away = [name for name in took_part if not folder.messages(name).exists()]
    if not away or not folder.messages(COORDINATOR).exists():
        return f"\naudit        {command}"
    return f"\naudit        {command} --logs DIR, with the folders of the run of {name_some(away)} in DIR"


def print_summary(summary: RunSummary, folder: RunFolder, console: Console) -> None:
    """Print a run's result, and the commands that show more."""
    custom, models = tuple(summary.custom_metrics.values()), _models(summary)
    if models:
        console.print(_results(models, custom, escape(f"{summary.scenario}: {summary.method}, seed {summary.seed}")))
        gallery = models[0][2]
        for remark in [] if gallery is None else gallery.remarks(models[0][1]):
            say(console, remark, "yellow")
    for metric in shown(models[0][1], custom) if models else ():
        if not metric.way:
            known = [(whose, measured[metric.name]) for whose, measured, _ in models if metric.name in measured]
            say(console, f"{metric.title}: {', '.join(f'{whose}{value:.4f}' for whose, value in known)}")
    seconds, traffic, tasks = summary.seconds, summary.bytes, summary.tasks
    lost = f"tasks: {tasks.merged} merged, {tasks.failed} failed{_failed_at(summary)}, {tasks.discarded} discarded\n"
    say(
        console,
        f"{_fairness(summary)}"
        f"traffic of training: {size_text(sum(traffic.up.values()))} up, {size_text(sum(traffic.down.values()))} down, "
        f"{counted(summary.messages.refused, 'message')} refused\n"
        f"{lost if tasks.failed or tasks.discarded else ''}"
        f"time: {seconds.total:.1f} s ({seconds.startup:.1f} s until all silos were ready), "
        f"memory of all processes {size_text(summary.processes.peak_pss_mb * 2**20)}\n"
        f"{_privacy(summary)}"
        f"model digest {summary.model_digest}",
    )
    paths = f"report       {folder.report}" if folder.report.exists() else "report       none: see the warning above"
    log = folder.messages(COORDINATOR)
    head = last_head(log) if log.exists() else None  # the logs of all silos are anchored in it
    if head is not None:
        paths = f"log head     {head[1]}\n{paths}"
    # Paths stay in one piece, to be copied.
    console.print(f"{paths}{_audit(summary, folder)}", markup=False, no_wrap=True, overflow="ignore", crop=False)
    for line in (*chosen_by_validation(summary), *items_left_out(summary)):
        say(console, line, "yellow")
    print_warnings(summary, console)


def print_warnings(summary: RunSummary, console: Console) -> None:
    """Warn that a run trained only in part, in single steps or hardly at all, or made the model worse."""
    for line in training_warnings(summary):
        say(console, line, "yellow")


def not_evaluated(summary: RunSummary) -> str:
    """A line on versions that were not evaluated and on the version of the metrics; empty if there are none."""
    if not summary.unevaluated:
        return ""
    versions = ", ".join(map(str, summary.unevaluated[:_MANY])) + (", ..." if len(summary.unevaluated) > _MANY else "")
    last = summary.versions in summary.unevaluated
    figures = ("; the metrics above are of an earlier version" if summary.metrics else "; there are no metrics") * last
    return f"the evaluator did not answer within the limit: version {versions} not evaluated{figures}"


def print_outcome(summary: RunSummary, folder: RunFolder, command: str, *, as_json: bool = False) -> None:
    """Print the result; exit if the evaluator did not answer; ``command`` then evaluates the last version."""
    if as_json:
        print_json({"folder": str(folder.root), **summary.plain()})
        print_warnings(summary, err)
    else:
        print_summary(summary, folder, out)
    if text := not_evaluated(summary):
        again = f"; evaluate it with [bold]{escape(command)}[/bold]" if summary.versions in summary.unevaluated else ""
        err.print(f"{escape(text)}{again}", soft_wrap=True)
        sys.exit(FAILED)
