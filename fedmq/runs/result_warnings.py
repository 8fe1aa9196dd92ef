"""What limits the meaning of a run's result, in one line each: silos, items and replies that were left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fedmq.evaluation.metrics import HEADLINE, metric_of
from fedmq.runs.run_records import RunSummary
from fedmq.text import enumerated, first_few, printable
from fedmq.wire.messages import EVALUATOR

#: Maximum number of names listed individually.
_MANY = 5


def name_some(names: Sequence[str]) -> str:
    """``silo-02, silo-03 and the evaluator``; for many names, the first few and the number of others."""
    shown_names = ["the evaluator" if name == EVALUATOR else name for name in names]
    return first_few(shown_names, _MANY) if len(shown_names) > _MANY else enumerated(shown_names)


def training_warnings(summary: RunSummary, untrained: Mapping[str, float]) -> Iterator[str]:
    """Lines that warn that a run trained only in part, hardly at all, or made the model worse.

    Args:
        summary: summary of the run.
        untrained: metrics of the untrained model.
    """
    without_task, not_merged = summary.without_part
    if without_task:
        yield (
            f"given no task in any round: {name_some(without_task)}; {summary.method} does not train them, or they "
            "were not selected or were offline"
        )
    if not_merged:
        yield f"none of their replies was merged, as they were lost or too late: {name_some(not_merged)}"
    if summary.hardly_changed:
        yield (
            f"the run hardly changed the model: by {summary.change:.1g} of its norm; a larger training.learning_rate, "
            "privacy.clip_norm, aggregation.robust.bound or aggregation.mixing changes it more"
        )
    both = [name for name in (HEADLINE, "map") if name in untrained and name in summary.metrics]
    if both and all(summary.metrics[name] < untrained[name] for name in both):
        before, after = (f"{metric_of(both[0]).heading} {each[both[0]]:.4f}" for each in (untrained, summary.metrics))
        yield f"the model retrieves worse than before training: {after}, untrained {before}"
    for silo, found in summary.never_merged.items():
        yield (
            f"{silo}: none of its replies was merged: {found.refused + found.scripted} refused, {found.errors} errors; "
            f"the last one: {printable(found.last)}"
        )


def chosen_by_validation(summary: RunSummary) -> Iterator[str]:
    """Lines on the best version by validation, and on a run that early stopping ended."""
    if summary.stopped_early:
        rounds = "" if summary.rounds is None else f" of {summary.rounds}"
        yield (
            f"ended early, after {summary.versions}{rounds} rounds: mean R@1 did not rise in the last evaluations "
            "(evaluation.patience)"
        )
    if summary.best is not None:
        title = metric_of(summary.best.metric).heading
        yield f"best version by validation: {summary.best.version}, {title} {summary.best.value:.4f}, in best/model"


def items_left_out(summary: RunSummary) -> Iterator[str]:
    """Lines on the items that were not trained on, and on the items and personal models that were not evaluated."""
    ignored = {name: silo.ignored for name, silo in summary.per_silo.items() if silo.ignored}
    if ignored:
        held, most = sum(silo.samples for silo in summary.per_silo.values()), sorted(ignored, key=lambda k: -ignored[k])
        named = name_some([f"{name} {ignored[name]}" for name in most])
        yield (
            f"{sum(ignored.values())} of {held} training items were not trained on, as they lack a modality or are "
            f"a silo's only pair: {named}"
        )
    if summary.heldout_without_pair:
        yield f"{summary.heldout_without_pair} held-out items lack a modality and were not evaluated"
    for silo, why in summary.personal_missing.items():
        what = "its personal model was not evaluated and is missing from means over silos"
        yield f"{silo}: {what}: {printable(why)}"
