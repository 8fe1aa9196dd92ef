"""Local training of supervised bases that use one labelled batch at a time.

The losses of triplet, DCH, GreedyHash and CSQ come from image hashing and have one kind of sample. Here the codes of
both towers form one set of samples: a silo contributes its modalities, and samples with a common label attract within
and across modalities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmq.federation.protocol import Context, Local, Task
from fedmq.models.two_tower import Out
from protocols.parts import training


def similar_items(a: Tensor, b: Tensor) -> Tensor:
    """S [A, B], 1 if two items share a label, from labels [A, C] and [B, C]."""
    return (a @ b.T > 0).to(a.dtype)


def pairs_of(image: Tensor | None, text: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Each modality that a silo has with itself, then both with each other."""
    pairs = [(each, each) for each in (image, text) if each is not None]
    return pairs if image is None or text is None else [*pairs, (image, text)]


@dataclass(frozen=True)
class Samples:
    """A batch's codes with their labels, images before texts."""

    codes: Tensor  # [m B, r] for the silo's m modalities
    labels: Tensor  # float [m B, C], multi-hot
    logits: Tensor | None  # [m B, C] of the network's classifier; None if it has none


def samples_of(image: Out | None, text: Out | None, labels: Tensor) -> Samples:
    """Both modalities' outputs of B items, None if not run, as samples of one set, with their labels float [B, C]."""
    present = [out for out in (image, text) if out is not None]
    logits = [out.logits for out in present if out.logits is not None]
    return Samples(
        torch.cat([out.code for out in present]), labels.repeat(len(present), 1), torch.cat(logits) if logits else None
    )


@dataclass(frozen=True)
class EveryLabelledBatch(training.Work):
    """One step per batch with a loss of the batch's outputs and labels."""

    local: Local  # the silo
    batch_size: int  # the scenario's batch size
    # Returns the loss from a batch's image and text outputs, None for a modality the silo lacks, float labels [B, C],
    # and the task's generator.
    loss: Callable[[Out | None, Out | None, Tensor, np.random.Generator], Tensor]
    rows: training.I64 | None = None  # int64 [n], the silo's items to train on; None trains on all

    def steps(self, epoch: int, generator: np.random.Generator) -> Iterator[training.Step]:
        """One step per batch of a permutation; the last batch is kept."""
        caption = training.choose_captions(self.local, generator)
        held = np.arange(len(self.local.dataset)) if self.rows is None else self.rows
        for places in training.batches(len(held), self.batch_size, generator):
            rows = held[places]
            yield training.Step(rows, caption, partial(self._of, training.labels_of(self.local, rows), generator))

    def _of(self, labels: Tensor, generator: np.random.Generator, image: Out | None, text: Out | None) -> Tensor:
        return self.loss(image, text, labels, generator)


Begin = Callable[[Any, Local, Context, Task], EveryLabelledBatch]
"""Starts a base loss in one task, given its options; a single-modality silo trains it on its own modality."""


def on_outputs(loss: Callable[[Any, Out | None, Out | None, Tensor], Tensor]) -> Begin:
    """A base loss of its options, a batch's image and text outputs, None for a missing modality, and labels [B, C]."""
    return _every_batch(lambda options, image, text, labels, _: loss(options, image, text, labels))


def on_samples(loss: Callable[[Any, Samples, np.random.Generator], Tensor]) -> Begin:
    """A base loss of its options, a batch's samples and the task's generator."""
    return _every_batch(
        lambda options, image, text, labels, *more: loss(options, samples_of(image, text, labels), *more)
    )


def _every_batch(loss: Callable[..., Tensor]) -> Begin:
    def begin(options: Any, local: Local, context: Context, task: Task) -> EveryLabelledBatch:
        return EveryLabelledBatch(local, context.training.batch_size, partial(loss, options))

    return begin
