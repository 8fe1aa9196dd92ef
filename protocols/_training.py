"""The silo's half that most methods share: local epochs over its own share, and what it reports of its embeddings."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmq.config.parts import Modality
from fedmq.data.label_levels import fine_columns
from fedmq.encoders.base import MODALITIES
from fedmq.errors import InputError, RunError
from fedmq.federation.protocol import Context, Local, Task
from fedmq.models.hash_networks import Tower
from fedmq.models.optimiser import optimiser
from fedmq.models.two_tower import Out, TwoTower
from fedmq.seeds import numpy_generator, torch_generator
from fedmq.wire.messages import Delta
from protocols import _aggregation
from protocols._losses import local_prototype, proximal, proximal_gradient

I64 = npt.NDArray[np.int64]
Outs = tuple[Out | None, Out | None]

#: loss of a batch from its image and text embeddings [B, d], None for a modality the silo lacks.
LossFunction = Callable[[Tensor | None, Tensor | None], Tensor]
#: loss of a batch from all that the towers make of it, None for a modality that was not run.
OutLoss = Callable[[Out | None, Out | None], Tensor]
#: what a method adds to a base's loss in a step; None adds nothing.
Extra = Callable[["Step", Out | None, Out | None], Tensor | None]

#: Samples a silo's prototypes are computed from (RCSR's released code).
PROTOTYPE_SAMPLES = 128
_BLOCK = 256
#: Of a silo's own, which are vectors and few numbers each, more go through at a time.
_ITEMS = 1024


@dataclass(frozen=True)
class TrainingResult:
    """What local epochs give.

    Args:
        delta: float32 [P] on the CPU, exactly zero outside the branches trained.
        loss: mean over all samples seen; 0 if nothing was trained.
        last_loss: the same of the last epoch alone.
    """

    delta: Tensor
    loss: float
    last_loss: float


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
    image, text = outputs(local, rows, caption)
    return None if image is None else image.code, None if text is None else text.code


def outputs_of_all(
    local: Local,
    caption: I64 | None,
    chosen: Callable[[Out], Tensor],
    *,
    block: int = _ITEMS,
    runs: Sequence[Modality] = MODALITIES,
) -> tuple[Tensor | None, Tensor | None]:
    """What the towers make of all the silo's items [n, d], with the model as it is, on the CPU, without gradient.

    Args:
        local: the silo.
        caption: int64 [n], the caption to take of every item; None where the silo has no text.
        chosen: which of a tower's outputs is wanted, [B, d] of B items.
        block: items that go through at a time.
        runs: towers wanted.

    Returns:
        Of images and of texts; None for a modality that the silo lacks or whose tower is not run.
    """
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    with torch.no_grad():
        for start in range(0, len(local.share), block):
            rows = np.arange(start, min(start + block, len(local.share)))
            for parts, out in zip(found, outputs(local, rows, caption, runs), strict=True):
                if out is not None:
                    parts.append(chosen(out).cpu())
    image, text = (torch.cat(parts) if parts else None for parts in found)
    return image, text


def embed_all(local: Local, caption: I64 | None, batch_size: int) -> tuple[Tensor | None, Tensor | None]:
    """Embeddings [n, d] of all the silo's items, ``batch_size`` at a time; see :func:`outputs_of_all`."""
    return outputs_of_all(local, caption, lambda out: out.code, block=batch_size)


@dataclass(frozen=True)
class Step:
    """One optimiser step of local training, as a base loss asks for it.

    Args:
        rows: int64 [B], the silo's items in the batch.
        caption: int64 [n], the caption to take of every item; None where the silo has no text.
        loss: of the batch.
        runs: towers that are run on the batch; those of modalities the silo lacks are left out by themselves.
        trains: branches of the flat buffer that the step changes: ``image``, ``text``, ``shared``.
        main: a method's own terms are added here; a base with several steps per batch has them in one only.
    """

    rows: I64
    caption: I64 | None
    loss: OutLoss
    runs: tuple[Modality, ...] = MODALITIES
    trains: tuple[str, ...] = ("image", "text", "shared")
    main: bool = True


class Work(ABC):
    """A base loss at work in one task of one silo; holds what the silo keeps between tasks."""

    @abstractmethod
    def steps(self, epoch: int, generator: np.random.Generator) -> Iterator[Step]:
        """The steps of one local epoch; resumed after each step is taken."""

    def kept(self) -> Mapping[str, Tensor]:
        """Personal tensors for the silo's state; never on the wire. None by default."""
        return {}

    @property
    def batches(self) -> int | None:
        """Batches of one pass over the silo's n items; None for ceil(n / B), with B the batch size."""
        return None


def batches_of(work: Work, size: int, batch_size: int) -> int:
    """Batches of one pass of a base loss over a silo's items."""
    return -(-size // batch_size) if work.batches is None else work.batches


@dataclass(frozen=True)
class EveryBatch(Work):
    """The plainest work: one step per batch over a permutation, one random caption per item and epoch.

    Args:
        local: the silo.
        batch_size: of the scenario.
        loss: of a batch's embeddings.
    """

    local: Local
    batch_size: int
    loss: LossFunction

    def steps(self, epoch: int, generator: np.random.Generator) -> Iterator[Step]:
        """One step per batch; the last batch is never dropped."""
        caption = choose_captions(self.local, generator)
        for rows in batches(len(self.local.share), self.batch_size, generator):
            yield Step(rows, caption, self._loss)

    def _loss(self, image: Out | None, text: Out | None) -> Tensor:
        return self.loss(None if image is None else image.code, None if text is None else text.code)


def labels_of(local: Local, rows: I64) -> Tensor:
    """Labels of some of the silo's items, float32 multi-hot [B, C] on the model's device.

    Raises:
        InputError: the data set has no labels.
    """
    if local.share.labels is None:
        raise InputError("objective.base", "a supervised base", "a data set with labels")
    return local.share.labels[torch.from_numpy(rows)].float().to(local.model.flat.device)


def categories(local: Local, context: Context) -> int:
    """c_k, how many categories a silo has items of; of two label levels those of the lower, which say what is alike."""
    if local.share.labels is None:
        return 0
    return int(local.share.labels[:, fine_columns(context.label_names)].any(0).sum())


def outputs(local: Local, rows: I64, caption: I64 | None, runs: Sequence[Modality] = MODALITIES) -> Outs:
    """What the towers make of some rows, in the modalities the silo has.

    Args:
        local: the silo.
        rows: int64 [B].
        caption: int64 [n], the caption to take of every item; None where the silo has no text.
        runs: towers wanted.
    """
    index = torch.from_numpy(rows)
    share, model = local.share, local.model
    image = text = None
    if "image" in runs and share.image is not None:
        image = model.outputs("image", share.image[index].to(model.flat.device))
    if "text" in runs and share.text is not None and caption is not None:
        chosen = share.text[index, torch.from_numpy(caption[rows])]
        text = model.outputs("text", chosen.to(model.flat.device))
    return image, text


def in_blocks(model: TwoTower, modality: Modality, items: Tensor) -> Iterator[Out]:
    """What a tower makes of many items [n, ...], block after block, without gradient."""
    for block in torch.split(items, _BLOCK):
        with torch.no_grad():
            found = model.outputs(modality, block.to(model.flat.device))
        yield found


@contextmanager
def parameters(local: Local, theta: Tensor) -> Iterator[None]:
    """The silo's model with other parameters [P] for a while, as the global or the previous net of a contrast.

    Dropout is off meanwhile.
    """
    with local.model.computing_with(theta), _dropout(local.model, None):
        yield


def branches_of(local: Local) -> dict[str, slice]:
    """Ranges of the flat buffer that the silo trains: what is shared and the branches of the modalities it has."""
    owned = {"image": local.silo.image, "text": local.silo.text, "shared": True}
    found = {name: local.model.branch(name) for name, has in owned.items() if has}
    return {name: part for name, part in found.items() if part.stop > part.start}


def load_model(local: Local, buffer: npt.NDArray[Any]) -> Tensor:
    """Put the downloaded parameters into the model.

    Returns:
        The parameters, float32 [P] on the model's device: nobody's to write to, and to subtract only, for where they
        start in memory is up to the message they came in.
    """
    local.model.load(buffer)
    return _aggregation.read_only(buffer).to(local.model.flat.device, torch.float32)


def train_epochs(
    local: Local,
    context: Context,
    task: Task,
    base: Tensor,
    work: Work | None,
    *,
    extra: Extra | None = None,
    lambda_s: float = 0.0,
) -> TrainingResult:
    """Local epochs from ``base``, which the model already holds.

    Args:
        local: the silo.
        context: optimiser, batch size, epochs, seed.
        task: its learning rate; its number seeds the order of samples and the choice of captions.
        base: float32 [P] parameters the silo started from.
        work: the base loss; None when the method has nothing for this silo to minimise yet, which leaves the model as
            it is (an optimiser with weight decay would otherwise still move it).
        extra: the method's own terms, added in each batch's main step.
        lambda_s: weight of the proximal term lambda_s * ||theta - base||^2, whose gradient is added by hand.

    Raises:
        RunError: the loss or the update is no longer finite.
    """
    if work is None:
        return TrainingResult(torch.zeros(base.shape), 0.0, 0.0)
    model, training = local.model, context.training
    generator = generator_of(context, local, task, "train")
    optimisers = {
        name: optimiser(model, training, task.learning_rate, [part]) for name, part in branches_of(local).items()
    }
    total, seen, moved = torch.zeros((), dtype=torch.float64, device=base.device), 0, False
    change = torch.empty_like(base)  # one buffer for all differences: a new one for each costs more than they do
    before, seen_before = total, seen
    path = ("dropout", local.silo.name, task.base_version, task.sequence)
    with _dropout(model, torch_generator(context.seed, *path)):
        for epoch in range(training.local_epochs):
            before, seen_before = total.clone(), seen
            for step in work.steps(epoch, generator):
                value = _backward(local, step, extra)
                if lambda_s and moved:  # at the first step theta is the base: neither value nor gradient
                    drift = torch.sub(model.flat.detach(), base, out=change)
                    value = value + proximal(drift, lambda_s)
                    model.add_gradient(proximal_gradient(drift, lambda_s))
                for name in step.trains:
                    if name in optimisers:
                        optimisers[name].step()
                moved = True
                total += value.double() * len(step.rows)
                seen += len(step.rows)
    model.zero_grad()  # gradients may lie in the buffer
    delta = torch.sub(model.flat.detach(), base, out=change).cpu()
    mean, last = float(total) / max(1, seen), float(total - before) / max(1, seen - seen_before)
    # Least and greatest are finite if and only if all are (NaN is passed on): one pass, no mask.
    least, greatest = torch.aminmax(delta)
    if not (math.isfinite(mean) and math.isfinite(float(least)) and math.isfinite(float(greatest))):
        raise RunError(f"training diverged at {local.silo.name}: loss {mean}; lower training.learning_rate")
    return TrainingResult(delta, mean, last)


def _backward(local: Local, step: Step, extra: Extra | None) -> Tensor:
    """A step's loss with the method's terms; its gradient is in the model then."""
    local.model.zero_grad()
    image, text = outputs(local, step.rows, step.caption, step.runs)
    value = step.loss(image, text)
    added = extra(step, image, text) if extra is not None and step.main else None
    value = value if added is None else value + added
    if value.requires_grad:
        value.backward()  # type: ignore[no-untyped-call]
    return value.detach()


@contextmanager
def _dropout(model: TwoTower, noise: torch.Generator | None) -> Iterator[None]:
    """Dropout masks from a generator while training (all towers draw from the one), or none for a while."""
    towers = [tower for tower in (model.visual, model.text) if isinstance(tower, Tower)]
    before = [tower.noise for tower in towers]
    for tower in towers:
        tower.noise = noise
    try:
        yield
    finally:
        for tower, old in zip(towers, before, strict=True):
            tower.noise = old


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


def delta_payload(context: Context, outcome: TrainingResult, samples: int) -> Delta:
    """The update as it goes up."""
    return Delta(layout_digest=context.layout.digest, buffer=outcome.delta.numpy(), n_samples=samples)
