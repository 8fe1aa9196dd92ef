"""What limits the meaning of a run's result: the number of items it was measured on, and what was left out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedmq.evaluation.metrics import metric_of, shown
from fedmq.runs.run_records import EvaluatedItems, OwnHeldOut, RunSummary
from fedmq.runs.status import StatusFile
from fedmq.text import counted, enumerated, first_few, printable, spread
from fedmq.wire.messages import EVALUATOR

#: Galleries with fewer items give coarse metrics.
COARSE = 100
_RECALL = re.compile(r"(?P<way>i2t|t2i|mean)_r(?P<k>\d+)")


@dataclass(frozen=True)
class Gallery:
    """The items that queries retrieve from."""

    items: str  # what was evaluated, in words, e.g. ``5 test images, 5 captions``
    images: int  # number of images
    captions: int | None = None  # number of captions; None if unknown, then there is at least one for each image
    # Queries of the direction with fewer of them; those of all silos together where each has its own gallery. None if
    # they are the items of the gallery.
    queries: int | None = None

    @property
    def smallest(self) -> int:
        """Size of the smaller gallery of the two directions."""
        return self.images if self.captions is None else min(self.images, self.captions)

    @property
    def step(self) -> float:
        """Change of mean R@1, the mean of both directions, if one more query retrieves the right item first."""
        return 1 / (2 * max(1, self.smallest if self.queries is None else self.queries))

    def uncertainty(self, recall: float) -> float:
        """Standard error of a mean R@1, as if all queries of both directions were independent; at least ``step``.

        The variance of a proportion p of n queries is p (1 - p) / n; n is twice the queries of the direction that has
        fewer, because captions of one image are not independent.
        """
        return max(self.step, math.sqrt(max(0.0, recall * (1 - recall)) * self.step))

    def certain(self, name: str) -> bool:
        """Whether a metric is recall@k with k at least the size of the gallery, which is 1 for any model."""
        match = _RECALL.fullmatch(name.rpartition(".")[2])
        if match is None:
            return False
        captions = self.images if self.captions is None else self.captions
        sizes = {"i2t": captions, "t2i": self.images, "mean": self.smallest}
        return int(match["k"]) >= sizes[match["way"]]

    def remarks(self, values: Mapping[str, float]) -> list[str]:
        """Sentences on recalls that are not shown, and on coarse metrics; empty for a large gallery."""
        sentences = []
        hidden = list(dict.fromkeys(metric.heading for metric in shown(values) if self.certain(metric.name)))
        if hidden:
            sentences.append(
                f"{' and '.join(hidden)} {'is' if len(hidden) == 1 else 'are'} not shown: "
                f"with {counted(self.smallest, 'item')} to retrieve from, any model reaches 1"
            )
        if self.smallest < COARSE:
            sentences.append(
                f"few items ({self.items}): a single query changes the R@1 of its direction by {2 * self.step:.2g}, "
                f"and the mean of both directions by {self.step:.2g}"
            )
        return sentences


def gallery_of(summary: RunSummary) -> Gallery | None:
    """The gallery of a run's main metrics: the evaluator's, or without one the silos'; None if unknown."""
    items = summary.evaluated
    if items is None:
        return None if summary.own_heldout is None else own_gallery(summary.own_heldout)
    return gallery_with(items)


def gallery_of_status(status: StatusFile) -> Gallery | None:
    """The gallery of a run in progress; None if only the evaluator knows it."""
    return None if status.evaluated is None else gallery_with(status.evaluated)


def gallery_with(items: EvaluatedItems) -> Gallery:
    """The gallery of the evaluator's items."""
    captions = "" if items.captions is None else f", {counted(items.captions, 'caption')}"
    return Gallery(f"{counted(items.images, f'{items.split} image')}{captions}", items.images, items.captions)


def own_gallery(heldout: OwnHeldOut) -> Gallery | None:
    """The smallest of the silos' own galleries, each with the silo's held-out pairs; None if no silo evaluated."""
    sizes = [silo.items for silo in heldout.per_silo.values()]
    if not sizes:
        return None
    few, most = min(sizes), max(sizes)
    size = f"{few}" if few == most else f"{few} to {most}"
    return Gallery(
        f"{counted(heldout.items, 'held-out pair')}, {size} in each silo's gallery", few, queries=heldout.items
    )


def meaningful(values: Mapping[str, float], gallery: Gallery | None) -> dict[str, float]:
    """The values without recalls that every model reaches in this gallery; all of them if it is unknown."""
    return {name: value for name, value in values.items() if gallery is None or not gallery.certain(name)}


#: Maximum number of names listed individually.
_MANY = 5


def name_some(names: Sequence[str]) -> str:
    """``silo-02, silo-03 and the evaluator``; for many names, the first few and the number of others."""
    shown_names = ["the evaluator" if name == EVALUATOR else name for name in names]
    return first_few(shown_names, _MANY) if len(shown_names) > _MANY else enumerated(shown_names)


#: The warning of a scenario or run whose tasks are all single steps.
ONE_STEP_TASKS = (
    "every task is one optimiser step, in which a proximal term or any other pull towards the downloaded model has no "
    "effect; a smaller training.batch_size or more training.local_epochs give more steps"
)


def about_silos(silos: Sequence[tuple[int, int | None, float | None]]) -> str:
    """A line about some silos: their training items, optimiser steps of a task, and divergence of labels.

    Args:
        silos: for each silo, its number of training items, the steps of its tasks (None if it has no tasks), and the
            Jensen-Shannon divergence [bits] of its labels from those of all silos (None without labels).
    """
    steps = [count for _, count, _ in silos if count is not None]
    divergences = [value for *_, value in silos if value is not None]
    parts = [f"training items of a silo: {spread([items for items, _, _ in silos])}"]
    parts += [f"optimiser steps of a task: {spread(steps)}"] if steps else []
    parts += [f"Jensen-Shannon divergence of labels: {spread(divergences, '.3f')}"] if divergences else []
    return "; ".join(parts)


def training_warnings(summary: RunSummary) -> Iterator[str]:
    """Lines that warn that a run trained only in part, in single steps or hardly at all, or made the model worse."""
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
    if summary.one_step_tasks:
        yield ONE_STEP_TASKS
    if (below := summary.below_start) is not None:
        model = "the personal models retrieve" if summary.personal_only else "the model retrieves"
        yield (
            f"{model} worse than before training: {metric_of(below.metric).heading} {below.after:.4f}, "
            f"untrained {below.before:.4f}"
        )
    for name, whose in summary.unmeasured.items():
        yield f"metric {name}: no value that can be used in the last evaluation of {name_some(whose)}"
    for silo, replies in summary.never_merged.items():
        yield (
            f"{silo}: none of its replies was merged: {replies.refused + replies.scripted} refused, "
            f"{replies.errors} errors; the last one: {printable(replies.last)}"
        )


def chosen_by_validation(summary: RunSummary) -> Iterator[str]:
    """Lines on the best version by validation, and on a run that ended before its last round."""
    if summary.ended_by is not None:
        spent = summary.ended_by == "privacy.budget"
        why = "no silo may send another reply" if spent else "mean R@1 did not rise in the last evaluations"
        yield f"ended early, after {summary.versions} of {summary.rounds} rounds: {why} ({summary.ended_by})"
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


def items_each(summary: RunSummary) -> str:
    """Number of items on which each silo's metrics are computed, in parentheses."""
    counts = [silo.heldout for silo in summary.per_silo.values() if silo.heldout]  # one without items has no metrics
    if not counts:
        return ""
    few, most = min(counts), max(counts)
    return f" ({counted(few, 'item') if few == most else f'{few} to {most} items'} each)"
