"""The first screen of a report: did it work, who is left behind, what left the sites, and what failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedmq.config.scenario import Scenario
from fedmq.evaluation.recall import HEADLINE
from fedmq.runs.report.figures import SiloResult, interval
from fedmq.runs.report.logs import LogFacts, incidents_text
from fedmq.runs.result_limits import gallery_of, name_some
from fedmq.runs.run_records import EvaluationLine, RunSummary
from fedmq.text import counted, first_few, size_text

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
    return [
        _worked(summary, evaluations),
        _left_behind(silo_results(summary, evaluations)),
        _sent(summary, scenario),
        _failures(summary, facts),
    ]


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
    lines = [f"Up: {by_kind[0]}.", f"Down: {by_kind[1]}.", protection(scenario)]
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
    if summary.unevaluated:
        lines.append(f"{counted(len(summary.unevaluated), 'evaluation')} without an answer.")
    bad = tasks.failed + tasks.discarded
    parts = [counted(bad, "task")] if bad else []
    parts += [counted(refused, "message")] if refused else []
    return "What failed or was refused?", " and ".join(parts) or "no task, no message", lines


def protection(scenario: Scenario) -> str:
    """What protects the updates."""
    privacy = scenario.privacy
    if privacy.clip_norm is None:
        return "Updates were neither clipped nor noised: the coordinator saw them as the silos computed them."
    if not privacy.noise_multiplier:
        return f"Updates were clipped to norm {privacy.clip_norm}, without noise: there is no formal guarantee."
    own = privacy.noise_from == "key"
    source = "each silo's private key" if own else "the scenario's seed, which anyone may know"
    return (
        f"Updates were clipped to norm {privacy.clip_norm} and noised (multiplier {privacy.noise_multiplier}); "
        f"the noise comes from {source}. fedmq audit computes epsilon."
    )
