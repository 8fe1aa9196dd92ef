"""Local steps that protect single items: clipped gradients of small groups of items, with noise (``privacy.items``).

DP-SGD clips the gradient of each item (Abadi et al., CCS 2016), which a loss that contrasts the items of a batch does
not have. Here a silo's items are split once into groups, and items are contrasted within their group only: an item then
changes the gradient of one group. DP-CLIP clips the gradient of such a contrast (Huang et al., "Safeguarding Data in
Multimodal AI", 2023); :func:`fedmq.federation.noise.item_epsilon` says what the noise guarantees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from fedmq.errors import RunError
from fedmq.federation.noise import normal, step_sampling, uniform
from fedmq.federation.protocol import Context, Local, Task
from fedmq.seeds import numpy_generator
from protocols.parts import training
from protocols.parts.training import I64, EveryBatch, Extra, Step, Work


def protected(work: Work | None, local: Local, context: Context, task: Task) -> Work | None:
    """Work as ``privacy.items`` has it; the same work without it.

    Raises:
        RunError: the work does not train on batches of a permutation.
    """
    if context.items is None or work is None:
        return work
    if not isinstance(work, EveryBatch):
        raise RunError("privacy.items: this method does not train on batches of items whose loss is that of the batch")
    source, path = local.secret or context.seed, (local.silo.name, task.base_version, task.sequence)
    return GroupedBatches(work.local, work.batch_size, work.loss, work.least, context=context, source=source, path=path)


@dataclass(frozen=True, kw_only=True)
class GroupedBatches(EveryBatch):
    """Steps on Poisson samples of groups, as many per epoch as there are batches."""

    context: Context  # seed of the groups, clipping and noise
    source: int | bytes  # source of samples and noise, see :func:`fedmq.federation.noise.transform`
    path: tuple[str | int, ...]  # silo, base version and sequence

    @property
    def batches(self) -> int:
        """Steps per epoch."""
        return step_sampling(self.context.training, len(self.local.dataset))[1] // self.context.training.local_epochs

    @cached_property
    def groups(self) -> list[I64]:
        """Rows of each group, the same in all tasks of a run; none is too small to have a loss."""
        assert self.context.items is not None  # noqa: S101 - see protected
        size, count = max(self.least, self.context.items.group), len(self.local.dataset)
        order = numpy_generator(self.context.seed, "groups", self.local.silo.name)
        return list(training.batches(count, size, order, self.least))

    def steps(self, epoch: int, generator: np.random.Generator) -> Iterator[Step]:
        """One step per batch; its groups are chosen when it is requested."""
        if not self.groups:  # a single pair has nothing to be contrasted with
            return
        caption, flat = training.choose_captions(self.local, generator), self.local.model.flat
        rate = step_sampling(self.context.training, len(self.local.dataset))[0]
        for number in range(self.batches):
            path = (*self.path, epoch, number)
            drawn = uniform(self.source, (*path, "groups"), flat.detach().cpu().numpy(), len(self.groups))
            chosen = [group for group, value in zip(self.groups, drawn, strict=True) if value <= rate]
            rows = np.concatenate([np.zeros(0, np.int64), *chosen])
            noised = partial(self._noised, chosen, rate * len(self.groups), path)
            yield Step(rows, caption, self._loss, backward=noised)

    def _noised(
        self, groups: Sequence[I64], expected: float, path: tuple[str | int, ...], step: Step, extra: Extra | None
    ) -> Tensor:
        options, model = self.context.items, self.local.model
        assert options is not None  # noqa: S101 - see protected
        loss, total = clipped_sum(self.local, step, groups, extra, options.clip_norm)
        if options.noise_multiplier:
            noise = torch.from_numpy(normal(self.source, (*path, "noise"), total.cpu().numpy()))
            total.add_(noise.to(total), alpha=options.noise_multiplier * options.clip_norm)
        model.zero_grad()
        model.add_gradient(total.div_(expected))
        return loss


def clipped_sum(
    local: Local, step: Step, groups: Sequence[I64], extra: Extra | None, norm: float
) -> tuple[Tensor, Tensor]:
    """The mean loss of the items of some groups (float32 []), and the sum [P] of the groups' clipped gradients.

    Each group, given by its rows, has its own loss. A gradient that is not finite adds nothing; ``norm`` is the largest
    norm of the others.
    """
    model, whole = local.model, [slice(0, local.model.flat.numel())]
    total = torch.zeros_like(model.flat)
    loss, sums = total.new_zeros(()), model.within(whole, total)
    for rows in groups:
        value = training.backward(local, replace(step, rows=rows, backward=None), extra)
        loss += value * (len(rows) / len(step.rows))
        pairs = zip(sums, model.within(whole), strict=True)
        with_gradient = [(into, each.grad) for into, each in pairs if each.grad is not None]
        if not with_gradient:  # of a loss that is a constant
            continue
        parts, gradients = map(list, zip(*with_gradient, strict=True))
        length = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
        if np.isfinite(length):
            torch._foreach_add_(parts, gradients, alpha=min(1.0, norm / max(length, 1e-30)))
    return loss, total
