"""Alternating training of DCMH and SHDCH: passes over one tower at a time, and buffers of both towers' outputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedmq.config.sections import Modality
from fedmq.encoders.base import MODALITIES
from fedmq.federation.protocol import Context, Local
from fedmq.models.hash_networks import signs
from fedmq.models.two_tower import Out
from protocols.parts import training
from protocols.parts.training import I64

#: Prefix of the buffers' names in the silo's state.
PREFIX = "base.buffer"
#: How the batches of a pass are drawn.
Draws = Literal["permutation", "fresh"]
#: A tower's output without or with FedCAFE's memory; without a memory the two are the same.
Which = Literal["plain", "enhanced"]
#: Factor of the hash loss: 1, or 1 over the number of silos.
Scale = Literal["one", "silos"]


def modalities_of(local: Local) -> tuple[Modality, ...]:
    """The modalities a silo has, image first."""
    owned = {"image": local.silo.image, "text": local.silo.text}
    return tuple(modality for modality in MODALITIES if owned[modality])


def factor(scale: Scale, context: Context) -> float:
    """Factor of the hash loss."""
    return 1.0 if scale == "one" else 1.0 / len(context.silos)


def output(out: Out, which: Which) -> Tensor:
    """The selected output [B, r]."""
    return out.code if which == "enhanced" else out.plain


@dataclass
class Alternating(training.Work):
    """A base loss that trains one tower at a time against buffers of both towers' outputs."""

    options: Any  # options of the base loss
    local: Local
    batch_size: int
    scale: float
    buffers: dict[Modality, Tensor]  # [n, r] of each modality the silo has
    codes: Tensor = field(init=False)  # common codes B [n, r]

    def __post_init__(self) -> None:
        self.codes = common_codes(self.buffers)

    @abstractmethod
    def loss(self, modality: Modality, rows: I64, out: Out) -> Tensor:
        """Loss of a batch from its modality, its rows and the tower's outputs."""

    def steps(self, epoch: int, generator: np.random.Generator) -> Iterator[training.Step]:
        """All batches of the image tower, then all of the text tower, then :meth:`update`."""
        yield from passes(self.local, self.batch_size, self.options.draws, generator, self.loss)
        self.update()

    def update(self) -> None:
        """New common codes B = sign(F + G)."""
        self.codes = common_codes(self.buffers)

    @property
    def batches(self) -> int:
        """Batches per pass of one tower."""
        return batches(len(self.codes), self.batch_size, self.options.draws)

    def kept(self) -> Mapping[str, Tensor]:
        """The buffers F and G and the rows of their items; B follows from them."""
        return kept(self.local, PREFIX, self.buffers)


def begun(options: Any, local: Local, context: Context) -> tuple[Any, Local, int, float, dict[Modality, Tensor]]:
    """Arguments of :class:`Alternating` for one task, with the buffers of the last one."""
    held = buffers(local, PREFIX, lambda out: output(out, options.buffer))
    return options, local, context.training.batch_size, factor(options.scale, context), held


def drawn(size: int, batch_size: int, draws: Draws, generator: np.random.Generator) -> Iterator[I64]:
    """Rows of each batch of a pass.

    ``permutation`` visits every item once. ``fresh`` draws each of floor(n / B) batches from a new permutation, as in
    DCMH's released code, with B = min(batch size, n), so that small silos train too.
    """
    if draws == "permutation":
        yield from training.batches(size, batch_size, generator)
        return
    width = min(batch_size, size)
    for _ in range(batches(size, batch_size, draws)):
        yield generator.permutation(size)[:width]


def batches(size: int, batch_size: int, draws: Draws) -> int:
    """Number of batches of :func:`drawn`."""
    return -(-size // batch_size) if draws == "permutation" else size // min(batch_size, size)


def passes(
    local: Local,
    batch_size: int,
    draws: Draws,
    generator: np.random.Generator,
    loss: Callable[[Modality, I64, Out], Tensor],
) -> Iterator[training.Step]:
    """One local epoch: all batches of the image tower, then all of the text tower, for the silo's modalities.

    ``draws`` as in :func:`drawn`; ``loss`` gives the loss of a modality, the batch's rows and the tower's outputs.
    """
    caption = training.choose_captions(local, generator)

    def step_loss(image: Out | None, text: Out | None, modality: Modality, rows: I64) -> Tensor:
        out = image if modality == "image" else text
        if out is None:
            raise ValueError(f"the {modality} tower was not run in its own step")
        return loss(modality, rows, out)

    for modality in modalities_of(local):
        for rows in drawn(len(local.dataset), batch_size, draws, generator):
            bound = partial(step_loss, modality=modality, rows=rows)
            yield training.Step(rows, caption, bound, runs=(modality,), trains=(modality,))


def buffers(local: Local, prefix: str, chosen: Callable[[Out], Tensor]) -> dict[Modality, Tensor]:
    """Outputs [n, r] of each tower on all local items: those kept from the last task, otherwise the downloaded model's.

    Kept outputs, whose names in the silo's state have the prefix, are used even though the model has changed since.
    They are discarded if the silo's items have changed, as after a scenario's drift.
    """
    result = {}
    first = np.zeros(len(local.dataset), np.int64)
    same = same_items(local, prefix)
    for modality in modalities_of(local):
        name = f"{prefix}.{modality}"
        if same and name in local.state:
            result[modality] = local.state[name].to(local.model.flat.device, copy=True)
            continue
        image, text = training.outputs_of_all(local, first, chosen, runs=(modality,))
        computed = image if modality == "image" else text
        if computed is not None:
            result[modality] = computed.to(local.model.flat.device)
    return result


def kept(local: Local, prefix: str, tensors: Mapping[Modality, Tensor]) -> dict[str, Tensor]:
    """Buffers as stored in the silo's state; the counterpart of :func:`buffers`.

    Buffers of a modality that the silo has lost are kept in case it returns, while the silo's items are the same.
    """
    names = {modality: f"{prefix}.{modality}" for modality in MODALITIES}
    lost = [name for modality, name in names.items() if modality not in tensors and name in local.state]
    before = {name: local.state[name] for name in lost} if same_items(local, prefix) else {}
    current = {names[modality]: tensor.cpu() for modality, tensor in tensors.items()}
    return {**before, **current, f"{prefix}.rows": local.dataset.rows.clone()}


def same_items(local: Local, prefix: str) -> bool:
    """Whether the buffers in the silo's state were computed for its current items."""
    rows = local.state.get(f"{prefix}.rows")
    return rows is not None and torch.equal(rows, local.dataset.rows)


def common_codes(outputs: Mapping[Modality, Tensor]) -> Tensor:
    """B = sign(F + G) in {-1, 1} [n, r], or the sign of the only buffer; sign(0) = +1."""
    return signs(torch.stack(list(outputs.values())).sum(0))
