"""The silo's half that most methods share: local epochs over its own share, and what it reports of its embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmq.errors import RunError
from fedmq.messages import Delta
from fedmq.models.two_tower import optimiser
from fedmq.protocol import Context, Local, Task
from fedmq.seeds import numpy_generator
from protocols._losses import local_prototype, proximal, proximal_gradient

I64 = npt.NDArray[np.int64]

#: loss of a batch from its image and text embeddings [B, d], None for a modality the silo lacks.
LossFunction = Callable[[Tensor | None, Tensor | None], Tensor]

#: Samples a silo's prototypes are computed from (RCSR's released code).
PROTOTYPE_SAMPLES = 128


@dataclass(frozen=True)
class Outcome:
    """What local epochs give.

    Args:
        delta: float32 [P] on the CPU, exactly zero outside the branches trained.
        loss: mean over all samples seen; 0 if nothing was trained.
    """

    delta: Tensor
    loss: float


def generator_of(context: Context, local: Local, task: Task, purpose: str) -> np.random.Generator:
    """A generator of this task's own; depends on nothing but the run's seed, the silo and the task."""
    return numpy_generator(context.seed, purpose, local.silo.name, task.base_version, task.sequence)


def batches(size: int, batch_size: int, generator: np.random.Generator) -> Iterator[I64]:
    """Rows of each batch over one permutation; the last batch is never dropped, however small.

    Dropping it would leave a silo with fewer samples than one batch untrained for ever, as public code does.
    """
    order = generator.permutation(size)
    for start in range(0, size, batch_size):
        yield order[start : start + batch_size]


def choose_captions(local: Local, generator: np.random.Generator) -> I64 | None:
    """One caption at random for each of the silo's items [n]; None where it has no text."""
    if local.share.text is None:
        return None
    counts = local.share.captions.numpy()
    chosen: I64 = (generator.random(len(counts)) * counts).astype(np.int64)
    return chosen


def embed(local: Local, rows: I64, caption: I64 | None) -> tuple[Tensor | None, Tensor | None]:
    """Embeddings [B, d] of some rows in the modalities the silo has.

    Args:
        local: the silo.
        rows: int64 [B].
        caption: int64 [n], the caption to take of every item; None where the silo has no text.
    """
    index = torch.from_numpy(rows)
    share, model = local.share, local.model
    image = None if share.image is None else model.image(share.image[index].to(model.flat.device))
    if share.text is None or caption is None:
        return image, None
    return image, model.caption(share.text[index, torch.from_numpy(caption[rows])].to(model.flat.device))


def branches_of(local: Local) -> tuple[slice, ...]:
    """Ranges of the flat buffer that the silo trains: the branches of the modalities it has."""
    return tuple(
        local.model.branch(name) for name, owned in (("image", local.silo.image), ("text", local.silo.text)) if owned
    )


def load_model(local: Local, buffer: npt.NDArray[Any]) -> Tensor:
    """Put the downloaded parameters into the model; returns them as float32 [P] on the model's device."""
    local.model.load(buffer)
    return local.model.flat.detach().clone()


def train_epochs(
    local: Local, context: Context, task: Task, base: Tensor, loss: LossFunction | None, *, lambda_s: float = 0.0
) -> Outcome:
    """Local epochs from ``base``, which the model already holds.

    Args:
        local: the silo.
        context: optimiser, batch size, epochs, seed.
        task: its learning rate; its number seeds the order of samples and the choice of captions.
        base: float32 [P] parameters the silo started from.
        loss: of one batch; None when the method has nothing for this silo to minimise yet, which leaves the model as it
            is (an optimiser with weight decay would otherwise still move it).
        lambda_s: weight of the proximal term lambda_s * ||theta - base||^2, whose gradient is added by hand.

    Raises:
        RunError: the loss or the update is no longer finite.
    """
    if loss is None:
        return Outcome(torch.zeros(base.shape), 0.0)
    model, training = local.model, context.training
    generator = generator_of(context, local, task, "train")
    steps = optimiser(model, training, task.learning_rate, branches_of(local))
    size = len(local.share)
    total = torch.zeros((), dtype=torch.float64, device=base.device)
    for epoch in range(training.local_epochs):
        caption = choose_captions(local, generator)
        for number, rows in enumerate(batches(size, training.batch_size, generator)):
            model.grad.zero_()
            value = loss(*embed(local, rows, caption))
            if value.requires_grad:
                value.backward()  # type: ignore[no-untyped-call]
            value = value.detach()
            if lambda_s and (epoch or number):  # at the first step theta is the base: neither value nor gradient
                model.grad.add_(proximal_gradient(model.flat, base, lambda_s))
                value = value + proximal(model.flat, base, lambda_s)
            steps.step()
            total += value.double() * len(rows)
    delta = (model.flat.detach() - base).cpu()
    mean = float(total) / (size * training.local_epochs)
    if not (math.isfinite(mean) and bool(torch.isfinite(delta).all())):
        raise RunError(f"training diverged at {local.silo.name}: loss {mean}; lower training.learning_rate")
    return Outcome(delta, mean)


def own_prototypes(local: Local, context: Context, task: Task) -> tuple[Tensor | None, Tensor | None]:
    """Image and text prototype [d] of the silo, with the model as it is now (RCSR eq 6).

    Unit-length mean over at most 128 random local samples, one caption each; None for a modality the silo lacks.
    """
    generator = generator_of(context, local, task, "prototypes")
    rows = np.sort(generator.permutation(len(local.share))[:PROTOTYPE_SAMPLES])
    caption = choose_captions(local, generator)
    with torch.no_grad():
        image, text = embed(local, rows, caption)
        return (
            None if image is None else local_prototype(image).cpu(),
            None if text is None else local_prototype(text).cpu(),
        )


def delta_payload(context: Context, outcome: Outcome, samples: int) -> Delta:
    """The update as it goes up."""
    return Delta(layout_digest=context.layout.digest, buffer=outcome.delta.numpy(), n_samples=samples)
