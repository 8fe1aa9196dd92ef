"""Local training shared by most methods: epochs over the silo's dataset, their snapshots, outputs of its towers."""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmq.config.scenario import Scenario
from fedmq.config.sections import Modality
from fedmq.data.labels import fine_columns
from fedmq.data.silo_dataset import SiloDataset
from fedmq.encoders.base import MODALITIES
from fedmq.errors import DivergedError, InputError
from fedmq.federation.noise import step_sampling
from fedmq.federation.protocol import Context, Local, Task
from fedmq.federation.updates import read_only
from fedmq.models.hash_networks import towers_with
from fedmq.models.objective_registry import OBJECTIVES
from fedmq.models.optimiser import FusedOptimiser, optimiser
from fedmq.models.two_tower import Out
from fedmq.packages import versions
from fedmq.seeds import numpy_generator, torch_generator
from fedmq.wire.payloads import Delta
from protocols.parts.losses import proximal, proximal_gradient

I64 = npt.NDArray[np.int64]
Outs = tuple[Out | None, Out | None]

#: Loss of a batch from its image and text embeddings [B, d], None for a modality the silo lacks.
LossFunction = Callable[[Tensor | None, Tensor | None], Tensor]
#: Loss of a batch from its tower outputs, None for a tower that was not run.
OutLoss = Callable[[Out | None, Out | None], Tensor]
#: A method's extra term in a step's loss; None adds nothing.
Extra = Callable[["Step", Out | None, Out | None], Tensor | None]

#: Block size for a silo's items.
_ITEMS = 1024
#: Names of the tensors of a snapshot.
_TASK, _ORDER, _DROPOUT, _MODEL, _SUMS = "task", "order", "dropout", "model", "sums"


@dataclass(frozen=True)
class TrainingResult:
    """Result of local epochs."""

    delta: Tensor  # float32 [P] on the CPU, exactly zero outside the trained branches
    loss: float  # mean over all samples of all epochs; 0 if nothing was trained
    last_loss: float  # mean over the last epoch
    steps: Mapping[str, int] = field(default_factory=dict)  # optimiser steps of each trained branch


def generator_of(context: Context, local: Local, task: Task, purpose: str) -> np.random.Generator:
    """A generator for one purpose in this task, seeded by the run's seed, the silo and the task only."""
    return numpy_generator(context.seed, purpose, local.silo.name, task.base_version, task.sequence)


def batches(size: int, batch_size: int, generator: np.random.Generator, least: int = 1) -> Iterator[I64]:
    """Rows of each batch of one permutation; the last batch is kept, however small.

    Public code drops it, so that a silo with fewer samples than one batch never trains. A last batch of fewer than
    ``least`` items is joined to the one before it; if there is none, the items are left out.
    """
    order = generator.permutation(size)
    starts = range(0, size, batch_size)[: batch_count(size, batch_size, least)]
    for start in starts:
        yield order[start:] if start == starts[-1] else order[start : start + batch_size]


def batch_count(size: int, batch_size: int, least: int = 1) -> int:
    """Number of batches of :func:`batches`, whose arguments it has; ``least`` is at most the batch size."""
    return max(0, -(-(size - least + 1) // batch_size))


def steps_per_task(scenario: Scenario, items: int) -> int:
    """Optimiser steps of a silo with a number of training items in each task: its batches in all local epochs.

    A base loss that trains its towers one after the other takes as many steps for each of them.
    """
    if scenario.privacy.items is not None:
        return step_sampling(scenario.training, items)[1]
    least = 2 if OBJECTIVES.find(scenario.objective.base).contrasts else 1
    return scenario.training.local_epochs * batch_count(items, scenario.training.batch_size, least)


def choose_captions(local: Local, generator: np.random.Generator) -> I64 | None:
    """A random caption index for each of the silo's items, int64 [n]; None if it has no text."""
    if local.dataset.text is None:
        return None
    counts = local.dataset.captions.numpy()
    chosen: I64 = (generator.random(len(counts)) * counts).astype(np.int64)
    return chosen


def embed(local: Local, rows: I64, caption: I64 | None) -> tuple[Tensor | None, Tensor | None]:
    """Embeddings [B, d] of some rows int64 [B] in the silo's modalities.

    ``caption`` int64 [n] is the caption index of every item; None if the silo has no text.
    """
    return codes(*outputs(local, rows, caption))


def codes(image: Out | None, text: Out | None) -> tuple[Tensor | None, Tensor | None]:
    """Codes [B, d] of a batch; None for a tower that was not run."""
    return None if image is None else image.code, None if text is None else text.code


def outputs_of_all(
    local: Local,
    caption: I64 | None,
    chosen: Callable[[Out], Tensor],
    *,
    block: int = _ITEMS,
    runs: Sequence[Modality] = MODALITIES,
) -> tuple[Tensor | None, Tensor | None]:
    """Outputs [n, d] of the current model on all the silo's items, on the CPU, without gradient.

    ``caption`` as in :func:`embed`; ``chosen`` selects one of a tower's outputs, [B, d]; ``block`` is the number of
    items per forward pass, and ``runs`` are the towers to run.

    Returns:
        Outputs of images and of texts; None for a modality that the silo lacks or whose tower is not run.
    """
    blocks: tuple[list[Tensor], list[Tensor]] = ([], [])
    with torch.no_grad():
        for start in range(0, len(local.dataset), block):
            rows = np.arange(start, min(start + block, len(local.dataset)))
            for parts, out in zip(blocks, outputs(local, rows, caption, runs), strict=True):
                if out is not None:
                    parts.append(chosen(out).cpu())
    image, text = (torch.cat(parts) if parts else None for parts in blocks)
    return image, text


def embed_all(local: Local, caption: I64 | None, batch_size: int) -> tuple[Tensor | None, Tensor | None]:
    """Embeddings [n, d] of all the silo's items, ``batch_size`` at a time; see :func:`outputs_of_all`."""
    return outputs_of_all(local, caption, lambda out: out.code, block=batch_size)


@dataclass(frozen=True)
class Step:
    """One optimiser step of local training, requested by a base loss."""

    rows: I64  # int64 [B], the silo's items in the batch
    caption: I64 | None  # int64 [n], the caption index of every item; None if the silo has no text
    loss: OutLoss  # returns the loss of the batch
    # Towers to run on the batch; towers of modalities that the silo lacks are skipped.
    runs: tuple[Modality, ...] = MODALITIES
    # Branches of the flat buffer that the step updates: ``image``, ``text``, ``shared``.
    trains: tuple[str, ...] = ("image", "text", "shared")
    main: bool = True  # whether the method's extra terms are added; true for one step per batch
    items: SiloDataset | None = None  # the dataset that ``rows`` and ``caption`` index; None for the silo's
    # Computes the step's loss with a method's extra terms, and the gradient that the model then has; None for
    # :func:`backward`.
    backward: Callable[[Step, Extra | None], Tensor] | None = None


class Work(ABC):
    """A base loss in one task of one silo, with the tensors that the silo keeps between tasks."""

    @abstractmethod
    def steps(self, epoch: int, generator: np.random.Generator) -> Iterator[Step]:
        """Yield the steps of one local epoch; each is taken before the next is requested."""

    def kept(self) -> Mapping[str, Tensor]:
        """Tensors for the silo's state, which are never sent; empty by default."""
        return {}

    @property
    def batches(self) -> int | None:
        """Batches per pass over the silo's n items; None for ceil(n / B), with B the batch size."""
        return None


def batches_of(work: Work, size: int, batch_size: int) -> int:
    """Batches per pass of a base loss over a silo's items."""
    return -(-size // batch_size) if work.batches is None else work.batches


@dataclass(frozen=True)
class EveryBatch(Work):
    """The default: one step per batch of a permutation, with one random caption per item and epoch."""

    local: Local  # the silo
    batch_size: int  # the scenario's batch size
    loss: LossFunction  # returns the loss from a batch's embeddings
    least: int = 1  # number of items from which on a batch has a loss, see :func:`batches`; 2 for a contrast

    def steps(self, epoch: int, generator: np.random.Generator) -> Iterator[Step]:
        """One step per batch; the last batch is kept."""
        caption = choose_captions(self.local, generator)
        for rows in batches(len(self.local.dataset), self.batch_size, generator, self.least):
            yield Step(rows, caption, self._loss)

    @property
    def batches(self) -> int:
        """Batches per pass."""
        return batch_count(len(self.local.dataset), self.batch_size, self.least)

    def _loss(self, image: Out | None, text: Out | None) -> Tensor:
        return self.loss(*codes(image, text))


def labels_of(local: Local, rows: I64) -> Tensor:
    """Labels of some of the silo's items, float32 multi-hot [B, C] on the model's device.

    Raises:
        InputError: the data set has no labels.
    """
    if local.dataset.labels is None:
        raise InputError("objective.base", "a supervised base", "a data set with labels")
    return local.dataset.labels[torch.from_numpy(rows)].float().to(local.model.flat.device)


def categories(local: Local, context: Context) -> int:
    """c_k, the number of categories among a silo's items; with two label levels, of the fine level."""
    if local.dataset.labels is None:
        return 0
    return int(local.dataset.labels[:, fine_columns(context.label_names)].any(0).sum())


def outputs(local: Local, rows: I64, caption: I64 | None, runs: Sequence[Modality] = MODALITIES) -> Outs:
    """Outputs of the towers ``runs`` that the silo has, of some rows int64 [B]; ``caption`` as in :func:`embed`."""
    index = torch.from_numpy(rows)
    share, model = local.dataset, local.model
    image = text = None
    if "image" in runs and share.image is not None:
        image = model.outputs("image", share.image[index].to(model.flat.device))
    if "text" in runs and share.text is not None and caption is not None:
        chosen = share.text[index, torch.from_numpy(caption[rows])]
        text = model.outputs("text", chosen.to(model.flat.device))
    return image, text


@contextmanager
def parameters(local: Local, theta: Tensor) -> Iterator[None]:
    """Run the silo's model with other parameters [P] and without dropout, e.g. the global or the previous model's."""
    with local.model.computing_with(theta), towers_with(local.model, noise=None):
        yield


def branches_of(local: Local) -> dict[str, Sequence[slice]]:
    """Ranges of the flat buffer that the silo trains, by branch: its modalities' branches and the shared layers."""
    owned = {"image": local.silo.image, "text": local.silo.text, "shared": True}
    slices = {name: local.model.branch(name) for name, has in owned.items() if has}
    return {name: [part] for name, part in slices.items() if part.stop > part.start}


def load_model(local: Local, buffer: npt.NDArray[Any]) -> Tensor:
    """Load the downloaded parameters into the model.

    Returns:
        The parameters, float32 [P] on the model's device. Read-only and of arbitrary alignment: use them for
        subtraction only, see :func:`protocols.parts.aggregation.as_tensor`.
    """
    local.model.load(buffer)
    return read_only(buffer).to(local.model.flat.device, torch.float32)


def train_epochs(
    local: Local,
    context: Context,
    task: Task,
    base: Tensor,
    work: Work | None,
    *,
    extra: Extra | None = None,
    lambda_s: float = 0.0,
    correction: Tensor | None = None,
    resumable: bool = False,
    trains: Callable[[Local], Mapping[str, Sequence[slice]]] | None = None,
) -> TrainingResult:
    """Train the model for the local epochs from the parameters that it holds.

    Args:
        local: the silo.
        context: optimiser, batch size, epochs, seed.
        task: its learning rate; its number seeds the order of samples and the choice of captions.
        base: float32 [P] parameters from which the update is measured: those that the model holds, or others (Ditto).
        work: the base loss; None if this silo has nothing to minimise yet: weight decay does not move the model either.
        extra: the method's extra loss terms, added in each batch's main step.
        lambda_s: weight of the proximal term lambda_s * ||theta - base||^2, whose gradient is added without autograd.
        correction: float32 [P], added to the parameters that a step trains after it (SCAFFOLD); None adds nothing.
        resumable: continue a task that was interrupted after its last snapshot; only of a silo's first call in a task,
            and effective only for work without its own state.
        trains: returns the ranges of the flat buffer to train, by branch; None for :func:`branches_of`.

    Raises:
        RunError: the loss or the update is not finite.
    """
    if work is None:
        return TrainingResult(torch.zeros(base.shape), 0.0, 0.0)
    model, training = local.model, context.training
    generator = generator_of(context, local, task, "train")
    ranges = (trains or branches_of)(local).items()
    optimisers = {name: optimiser(model, training, task.learning_rate, parts, correction) for name, parts in ranges}
    total, seen = torch.zeros((), dtype=torch.float64, device=base.device), 0
    change = torch.empty_like(base)  # reused for all differences: allocating costs more than subtracting
    before, seen_before, snapshots, start = total, seen, None, 0
    dropout = torch_generator(context.seed, "dropout", local.silo.name, task.base_version, task.sequence)
    if resumable and extra is None and isinstance(work, EveryBatch) and training.local_epochs > 1:
        snapshots = Snapshots(local, task, base, optimisers, generator, dropout)
        start, total, seen = snapshots.resume(total)
    moved = lambda_s > 0 and not torch.equal(model.flat.detach(), base)
    with towers_with(model, noise=dropout):
        for epoch in range(start, training.local_epochs):
            before, seen_before = total.clone(), seen
            steps = work.steps(epoch, generator)
            seen, moved = train_epoch(local, steps, optimisers, base, change, (total, seen, moved), extra, lambda_s)
            if snapshots is not None and epoch + 1 < training.local_epochs:
                snapshots.keep(epoch + 1, total, seen)
    model.zero_grad()  # gradients may be views of `change`, which is overwritten next
    delta = torch.sub(model.flat.detach(), base, out=change).cpu()
    mean, last = float(total) / max(1, seen), float(total - before) / max(1, seen - seen_before)
    # Minimum and maximum are finite if and only if all values are (NaN propagates): one pass, no mask.
    least, greatest = torch.aminmax(delta)
    if not (math.isfinite(mean) and math.isfinite(float(least)) and math.isfinite(float(greatest))):
        raise DivergedError(f"training diverged at {local.silo.name}: loss {mean}; lower training.learning_rate")
    return TrainingResult(delta, mean, last, {name: each.taken for name, each in optimisers.items()})


def train_epoch(
    local: Local,
    steps: Iterator[Step],
    optimisers: Mapping[str, FusedOptimiser],
    base: Tensor,
    change: Tensor,
    sums: tuple[Tensor, int, bool],
    extra: Extra | None,
    lambda_s: float,
) -> tuple[int, bool]:
    """Take the steps of one epoch.

    Other arguments are as of :func:`train_epochs`; ``change`` float32 [P] is overwritten, and ``sums`` holds the sum of
    losses so far, float64 [], updated in place, the number of samples, and whether theta may differ from base.

    Returns:
        The number of samples so far, and whether theta may differ from base.
    """
    model, (total, seen, moved) = local.model, sums
    for step in steps:
        value = backward(local, step, extra) if step.backward is None else step.backward(step, extra)
        if lambda_s and moved:  # otherwise the term and its gradient are zero
            drift = torch.sub(model.flat.detach(), base, out=change)
            value = value + proximal(drift, lambda_s)
            model.add_gradient(proximal_gradient(drift, lambda_s))
        for name in step.trains:
            if name in optimisers:
                optimisers[name].step()
        moved = True
        total += value.double() * len(step.rows)
        seen += len(step.rows)
    return seen, moved


def backward(local: Local, step: Step, extra: Extra | None) -> Tensor:
    """Compute a step's loss with the method's terms; the model has its gradient then."""
    local.model.zero_grad()
    items = local if step.items is None else replace(local, dataset=step.items)
    image, text = outputs(items, step.rows, step.caption, step.runs)
    value = step.loss(image, text)
    added = extra(step, image, text) if extra is not None and step.main else None
    value = value if added is None else value + added
    if value.requires_grad:
        value.backward()  # type: ignore[no-untyped-call]
    return value.detach()


def delta_payload(context: Context, outcome: TrainingResult, samples: int) -> Delta:
    """Upload payload of the update."""
    return Delta(layout_digest=context.layout.digest, buffer=outcome.delta.numpy(), n_samples=samples)


def _bytes(value: object) -> Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


class Snapshots:
    """Snapshots between epochs of all that the rest of a task depends on; it continues from them bit-identically.

    Args:
        local: the silo; without ``local.epochs`` nothing is kept.
        task: its task.
        base: float32 [P] parameters before training.
        optimisers: optimisers of the branches that it trains, by name.
        generator: generator of the order of samples and the choice of captions.
        dropout: generator of dropout masks.
    """

    def __init__(
        self,
        local: Local,
        task: Task,
        base: Tensor,
        optimisers: Mapping[str, FusedOptimiser],
        generator: np.random.Generator,
        dropout: torch.Generator,
    ) -> None:
        self._store = local.epochs
        self._local, self._task, self._base = local, task, base
        self._optimisers, self._generator, self._dropout = optimisers, generator, dropout

    def resume(self, total: Tensor) -> tuple[int, Tensor, int]:
        """Number of epochs done, sum of their losses (float64 [], on the device of ``total``) and their samples.

        A snapshot of another task is ignored; the store has checked its digest.
        """
        saved = {} if self._store is None else self._store.load()
        if self._store is None or not saved or not torch.equal(saved[_TASK], self._identity()):
            return 0, total, 0
        epochs, self._generator.bit_generator.state = json.loads(bytes(saved[_ORDER].numpy()))
        self._dropout.set_state(saved[_DROPOUT])
        self._local.model.load(saved[_MODEL].numpy())
        for name, one in self._optimisers.items():
            start = f"{name}."
            one.restore({key.removeprefix(start): each for key, each in saved.items() if key.startswith(start)})
        self._store.resumed(epochs)
        return epochs, saved[_SUMS][0].to(total.device), int(saved[_SUMS][1])

    def keep(self, epochs: int, total: Tensor, seen: int) -> None:
        """Keep a snapshot after a number of epochs, if that is due."""
        if self._store is not None:
            self._store.save(lambda: self._taken(epochs, total, seen))

    def _taken(self, epochs: int, total: Tensor, seen: int) -> Mapping[str, Tensor]:
        tensors = {
            _TASK: self._identity(),
            _ORDER: _bytes([epochs, self._generator.bit_generator.state]),
            _DROPOUT: self._dropout.get_state(),
            _MODEL: self._local.model.flat.detach().cpu().clone(),
            _SUMS: torch.tensor([float(total), float(seen)], dtype=torch.float64),
        }
        for name, one in self._optimisers.items():
            tensors |= {f"{name}.{key}": value for key, value in one.state().items()}
        return tensors

    def _identity(self) -> Tensor:
        """What a snapshot belongs to: the silo, the task, the parameters that it starts from, and the software."""
        digest = hashlib.sha256(self._base.cpu().contiguous().numpy().tobytes()).hexdigest()
        task = self._task
        facts = [self._local.silo.name, task.sequence, task.base_version, task.round, task.learning_rate, digest]
        return _bytes([*facts, versions()])
