"""Items without a pair in a silo that holds both modalities: RCSR and FedBridge anchor them item by item.

Each kind of such items, images without captions and captions without images, is trained like the dataset of a silo that
has only this modality, in batches of its own between those of the pairs, so that no contrast takes an item without a
pair for one. The pairs train as they would without the other items: their batches and captions are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedmq.config.sections import Modality
from fedmq.data.silo_dataset import SiloDataset, joined
from fedmq.federation.protocol import Context, Local, Task
from protocols.parts import training
from protocols.parts.training import Step, Work


def views(local: Local) -> list[Local]:
    """The silo's unpaired items of each kind, as the only items of a silo that lacks the other modality."""
    return [
        replace(local, silo=replace(local.silo, image=part.image is not None, text=part.text is not None),
                dataset=part, unpaired=())
        for part in local.unpaired
    ]  # fmt: skip


def modality_of(view: Local) -> Modality:
    """The only modality of a view."""
    return "image" if view.silo.image else "text"


def beside(
    pairs: Work | None, local: Local, context: Context, task: Task, work_of: Callable[[Local], Work | None]
) -> Work | None:
    """A silo's training on pairs together with that on unpaired items; ``pairs`` itself without any of those.

    Either is None if it has nothing to minimise (yet); ``work_of`` gives the work on one of :func:`views`.
    """
    parts = tuple((view, work) for view in views(local) if (work := work_of(view)) is not None)
    if not parts:
        return pairs
    own = {
        purpose: training.generator_of(context, local, task, f"unpaired {purpose}")
        for purpose in ("order", *(modality_of(view) for view, _ in parts))
    }
    return Interleaved(pairs, len(local.dataset), parts, context.training.batch_size, own)


@dataclass(frozen=True)
class Interleaved(Work):
    """Work on pairs and on unpaired items, their batches in a random order."""

    pairs: Work | None  # the work on the n pairs, or None
    size: int  # n
    parts: tuple[tuple[Local, Work], ...]  # the work on each kind of unpaired items, with the view it was made for
    batch_size: int
    own: dict[str, np.random.Generator]  # generators of the order of batches, and of each part's items, by modality

    def steps(self, epoch: int, generator: np.random.Generator) -> Iterator[Step]:
        """The steps of all parts; each part's steps are in its own order."""
        sources = [iter(()) if self.pairs is None else self.pairs.steps(epoch, generator)]
        counts = [0 if self.pairs is None else training.batches_of(self.pairs, self.size, self.batch_size)]
        for view, work in self.parts:
            sources.append(_steps_of(view, work, epoch, self.own[modality_of(view)]))
            counts.append(training.batches_of(work, len(view.dataset), self.batch_size))
        for source in self.own["order"].permutation(np.repeat(np.arange(len(sources)), counts)):
            yield next(sources[source])


def _steps_of(view: Local, work: Work, epoch: int, generator: np.random.Generator) -> Iterator[Step]:
    """Steps on a view's items, which train the branch of their modality and what both towers share."""
    modality = modality_of(view)
    for step in work.steps(epoch, generator):
        yield replace(step, items=view.dataset, runs=(modality,), trains=(modality, "shared"), main=False)


def items_with(local: Local, modality: Modality) -> SiloDataset:
    """All the silo's items that have a modality, those of the dataset first, in this modality only.

    Raises:
        ValueError: the silo does not have it.
    """
    parts = [part for part in (local.dataset, *local.unpaired) if getattr(part, modality) is not None]
    if not parts:
        raise ValueError(f"{local.silo.name} has no {modality}")
    if len(parts) == 1:
        whole = parts[0]
        image, text = (whole.image, None) if modality == "image" else (None, whole.text)
        return SiloDataset(image, text, whole.captions, None, whole.rows)
    images = [part.image for part in parts if part.image is not None and modality == "image"]
    texts = [part.text for part in parts if part.text is not None and modality == "text"]
    rows, captions = torch.cat([part.rows for part in parts]), torch.cat([part.captions for part in parts])
    return SiloDataset(torch.cat(images) if images else None, joined(texts) if texts else None, captions, None, rows)
