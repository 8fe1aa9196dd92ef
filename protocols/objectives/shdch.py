"""SHDCH (Zhan et al. 2020): class codes on two label levels, learned together with the networks; a base of FedCAFE.

With outputs H = F, G in (-1, 1) of r bits, labels L1 (coarse) and L2 (fine), their class codes Y1 and Y2 in {-1, 1},
S_12 = 1 for a fine class of a coarse one, and B = sign(F + G), the objective is

J = sum_H (alpha |r L1 - H Y1^T|^2 + beta |r L2 - H Y2^T|^2 + gamma |B - H|^2) + eta |r S_12 - Y1 Y2^T|^2

The label names' prefixes ``coarse:`` and ``fine:`` define the levels; with one level the coarse terms are left out,
which gives PLFedCMH's local loss. Class codes stay at the silo; all silos start from the same ones. The hierarchy comes
from the labels of the silo's items, so a fine class that it has no item of is not tied to any coarse class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedmq.config.sections import Modality, NonNegative, Passes
from fedmq.data.labels import coarse_columns, fine_columns
from fedmq.errors import InputError
from fedmq.federation.protocol import Context, Local, Task
from fedmq.models.objective_registry import ObjectiveKind, TowerPlan
from fedmq.models.two_tower import Out
from fedmq.seeds import torch_generator
from protocols.parts import alternating, training
from protocols.parts.training import I64

CODES = "base.codes"


@dataclass(frozen=True)
class Options:
    """Options of SHDCH; defaults are its released code's, but for ``image_layers``.

    Args:
        alpha: weight of the coarse class codes; two levels only.
        beta: weight of the fine class codes, or of the only level's.
        gamma: weight of the distance to the common codes.
        eta: weight of the tie between the two levels' codes; two levels only.
        image_layers: hidden layers of the image tower: 1 over frozen features, 0 as in the paper, which trains CNN-F
            below it (``backbone.end_to_end``).
        tanh: towers that end in tanh: ``both``, as in SHDCH's and PLFedCMH's code, or only ``text``.
        levels: number of label levels; null uses two if label names begin with ``coarse:``.
        sweeps: maximum sweeps over the bits of the class codes per epoch.
        buffer: outputs stored in the buffers under FedCAFE: ``enhanced`` or ``plain``.
        likelihood: outputs of the batch in the loss under FedCAFE: ``plain`` or ``enhanced``.
        draws: draw the batches of a pass from one ``permutation``, or each from a ``fresh`` one as in DCMH's released
            code.
        scale: factor of the loss: ``one``, or 1 over the number of ``silos``.
    """

    alpha: NonNegative = 0.3
    beta: NonNegative = 0.7
    gamma: NonNegative = 10.0
    eta: NonNegative = 100.0
    image_layers: Literal[0, 1] = 1
    tanh: Literal["both", "text"] = "both"
    levels: Literal[1, 2] | None = None
    sweeps: Passes = 3
    buffer: alternating.Which = "enhanced"
    likelihood: alternating.Which = "plain"
    draws: alternating.Draws = "permutation"
    scale: alternating.Scale = "one"


@dataclass(frozen=True)
class Level:
    """One level of labels."""

    weight: float
    labels: Tensor  # float32 [n, C]
    codes: Tensor  # class codes Y [C, r] in {-1, 1}


def output_loss(outputs: Tensor, codes: Tensor, levels: Sequence[Level], gamma: float) -> Tensor:
    """The part of the objective that depends on one modality's outputs: ||r L - H Y^T||^2 per level and common codes.

    Args:
        outputs: H [B, r].
        codes: common codes B of the same items, [B, r].
        levels: with the labels of the same items.
        gamma: weight of ||B - H||^2.
    """
    bits = outputs.shape[1]
    parts = [level.weight * (bits * level.labels - outputs @ level.codes.T).square().sum() for level in levels]
    return torch.stack([*parts, gamma * (codes - outputs).square().sum()]).sum()


def swept_codes(
    level: Level, outputs: Sequence[Tensor], other: Tensor, inclusion: Tensor, eta: Tensor, sweeps: int
) -> Tensor:
    """Class codes after discrete coordinate descent over their bits; no step increases the objective.

    Bit k becomes sign(Q_k - alpha Y (sum_H H^T H)_k - eta Y (Y'^T Y')_k), both products without the bit itself, where
    Q = r (alpha L^T sum_H H + eta S Y'); sign(0) keeps the bit.

    Args:
        level: the level whose codes change.
        outputs: H [n, r] of each modality.
        other: codes Y' [C', r] of the other level; no rows if there is none.
        inclusion: S [C, C'], 1 if a class belongs to one of the other level.
        eta: weight of the tie of each class, [C, 1].
        sweeps: maximum number of sweeps; stops when no bit changes.
    """
    codes, bits = level.codes.clone(), level.codes.shape[1]
    off_diagonal = 1 - torch.eye(bits, dtype=codes.dtype, device=codes.device)
    total = torch.stack(list(outputs)).sum(0)
    gram = level.weight * torch.stack([output.T @ output for output in outputs]).sum(0) * off_diagonal
    tied = (other.T @ other) * off_diagonal
    target = bits * (level.weight * level.labels.T @ total + eta * (inclusion @ other))
    for _ in range(sweeps):
        before = codes.clone()
        for bit in range(bits):
            value = target[:, bit] - codes @ gram[:, bit] - eta[:, 0] * (codes @ tied[:, bit])
            codes[:, bit] = torch.where(value > 0, 1.0, torch.where(value < 0, -1.0, codes[:, bit]))
        if torch.equal(codes, before):
            break
    return codes


@dataclass
class Shdch(alternating.Alternating):
    """SHDCH in one task: an image pass, a text pass, new class codes and new common codes in each epoch."""

    levels: list[Level]  # the coarse level, if there is one, and the fine one

    def loss(self, modality: Modality, rows: I64, out: Out) -> Tensor:
        """Loss of a batch; the batch's outputs enter the buffer."""
        index = torch.from_numpy(rows).to(self.codes.device)
        self.buffers[modality][index] = alternating.output(out, self.options.buffer).detach()
        outputs = alternating.output(out, self.options.likelihood)
        levels = [Level(level.weight, level.labels[index], level.codes) for level in self.levels]
        value = output_loss(outputs, self.codes[index], levels, self.options.gamma)
        return self.scale * value / (len(rows) * len(self.codes))

    def update(self) -> None:
        """New class codes Y1 and Y2, then B."""
        outputs = list(self.buffers.values())
        if len(self.levels) == 2:
            coarse, fine = self.levels
            inclusion = (coarse.labels.T @ fine.labels > 0).to(fine.codes.dtype)
            present = fine.labels.any(0)
            eta = self.options.eta * torch.ones_like(coarse.codes[:, :1])
            codes = swept_codes(coarse, outputs, fine.codes[present], inclusion[:, present], eta, self.options.sweeps)
            coarse = Level(coarse.weight, coarse.labels, codes)
            eta = self.options.eta * present[:, None].to(fine.codes.dtype)
            codes = swept_codes(fine, outputs, coarse.codes, inclusion.T, eta, self.options.sweeps)
            self.levels = [coarse, Level(fine.weight, fine.labels, codes)]
        else:
            (only,) = self.levels
            nothing, zero = only.codes.new_zeros(len(only.codes), 0), torch.zeros_like(only.codes[:, :1])
            codes = swept_codes(only, outputs, only.codes[:0], nothing, zero, self.options.sweeps)
            self.levels = [Level(only.weight, only.labels, codes)]
        super().update()

    def kept(self) -> Mapping[str, Tensor]:
        """The buffers F and G, the rows of their items, and the class codes; B follows from them."""
        return {**super().kept(), **{f"{CODES}.{place}": level.codes.cpu() for place, level in enumerate(self.levels)}}


def begin(options: Options, local: Local, context: Context, task: Task) -> Shdch:
    """Start SHDCH for one task, with the buffers and class codes of the last one.

    Raises:
        InputError: ``levels`` is 2, but the label names have one level.
    """
    coarse, fine = coarse_columns(context.label_names), fine_columns(context.label_names)
    if options.levels == 2 and not coarse:
        raise InputError("objective.levels", 2, "1: no label of the data set begins with coarse:")
    labels = training.labels_of(local, np.arange(len(local.dataset)))
    two = bool(coarse) and options.levels != 1
    wanted = [(options.alpha, coarse), (options.beta, fine)] if two else [(options.beta, fine)]
    levels = []
    for place, (weight, columns) in enumerate(wanted):
        kept = local.state.get(f"{CODES}.{place}")
        codes = first_codes(context, place, len(columns)) if kept is None else kept
        levels.append(Level(weight, labels[:, columns], codes.to(labels.device, copy=True)))
    return Shdch(*alternating.begun(options, local, context), levels)


def first_codes(context: Context, place: int, classes: int) -> Tensor:
    """Initial class codes, drawn from {-1, 1} [classes, r]; the same at every silo, so that silos can agree."""
    generator = torch_generator(context.seed, "shdch", place)
    drawn = torch.randint(0, 2, (classes, context.dim), generator=generator)
    return drawn.float() * 2 - 1


def network(options: Options) -> TowerPlan:
    """DCMH's widths, with tanh in both towers or, as SHDCH's own code has it, in the text tower alone."""
    hidden = (4096,) * options.image_layers
    return TowerPlan(hidden, (8192,), tanh=True, classifier=True, std=0.01, squashed=options.tanh)


OBJECTIVE = ObjectiveKind(Options, begin, network, both_levels=True)
