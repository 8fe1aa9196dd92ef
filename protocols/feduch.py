"""FedUCH: unsupervised cross-modal hashing; contrast with and distillation from global networks (Zhu et al., 2023).

FedAvg (eq 3) on an unsupervised base (dgcpn, djsrh or jdsh) with two additional terms (eq 14). Eq 11 pulls the network
of one modality towards the global network of the other modality and away from the silo's previous one; eq 12 pulls its
codes towards the global network's codes of the same modality. The global networks are the downloaded ones, the
previous ones those after the silo's last training; at its first participation a silo has none and skips eq 11, which
would be the constant log 2. If a base makes several updates per batch, the first has both terms. A silo with one
modality has no pairs to contrast and trains eq 12 only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedmq.config.sections import NonNegative, Positive
from fedmq.errors import InputError
from fedmq.federation.protocol import Context, Local, SiloFacts, Task, take
from fedmq.models.two_tower import Out
from fedmq.wire.payloads import Model
from protocols import fedavg
from protocols.fedmekt import divergence
from protocols.moon import model_contrast
from protocols.parts import personal_model, training
from protocols.parts.aggregation import as_tensor
from protocols.parts.similarity import mean_square
from protocols.parts.variant import variant

#: Bases whose two towers have projections of different widths, which cannot be contrasted.
_UNEQUAL = ("dcmh", "shdch")


@dataclass(frozen=True)
class FedUchOptions(fedavg.AnchoredOptions):
    """Options of FedUCH, in addition to those of FedAvg.

    Args:
        contrast: add the contrast between modalities (eq 11); off in FedUCH-1 and -3.
        distill: add the distillation within a modality (eq 12); off in FedUCH-1 and -2.
        mu: weight of the contrast; only with ``contrast`` (IAPR 0.5, COCO 0.4, NUS-WIDE 0.3).
        phi: weight of the distillation; only with ``distill`` (IAPR 0.5, COCO 0.7, NUS-WIDE 0.7).
        contrast_tau: temperature of the contrast (tau in eq 11); ``tau`` is the temperature of info_nce.
        kd: distance of the distillation: ``kl`` of the softmax of the codes (eq 13), or ``mse`` of the codes.
        kd_temperature: temperature of ``kl``; the default is the released code's.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **fedavg.AnchoredOptions.OF,
        "contrast": ("mu", "contrast_tau"),
        "distill": ("phi", "kd", "kd_temperature"),
        "kd=kl": ("kd_temperature",),
    }

    contrast: bool = True
    distill: bool = True
    mu: NonNegative = 0.6
    phi: NonNegative = 0.4
    contrast_tau: Positive = 1.0
    kd: Literal["kl", "mse"] = "kl"
    kd_temperature: Positive = 1.5


def cross_modal_contrast(
    local: training.Outs, shared: training.Outs, previous: training.Outs, tau: float
) -> list[Tensor]:
    """Eq 11 for each modality: MOON's contrast of its projections with those of the *other* modality of each pair.

    Args:
        local: image and text outputs of the networks in training.
        shared: outputs of the global networks, the positives.
        previous: outputs of the silo's previous networks, the negatives.
        tau: temperature.
    """
    return [
        model_contrast(mine.hidden, glob.hidden, [old.hidden], tau)
        for mine, glob, old in zip(local, shared[::-1], previous[::-1], strict=True)
        if mine is not None and glob is not None and old is not None
    ]


def distillation(local: training.Outs, shared: training.Outs, options: FedUchOptions) -> list[Tensor]:
    """Eqs 12 and 13 for each modality: distance of its codes to the global network's.

    Codes are not distributions; taking the softmax over their bits is our reading.

    Args:
        local: image and text outputs of the networks in training.
        shared: outputs of the global networks.
        options: distance and temperature.
    """
    pairs = [
        (mine.code, glob.code)
        for mine, glob in zip(local, shared, strict=True)
        if mine is not None and glob is not None
    ]
    if options.kd == "mse":
        return [mean_square(mine, glob) for mine, glob in pairs]
    return [divergence(mine, glob, options.kd_temperature) for mine, glob in pairs]


def terms(
    local: training.Outs, shared: training.Outs, previous: training.Outs | None, options: FedUchOptions
) -> Tensor | None:
    """The terms mu J_CR + phi J_KD that eq 14 adds to the base loss of a batch; None if there are none.

    Args:
        local: image and text outputs of the networks in training.
        shared: outputs of the global networks.
        previous: outputs of the silo's previous networks; None at its first participation or without contrast.
        options: weights and switches.
    """
    parts: list[Tensor] = []
    if previous is not None:
        parts += [options.mu * term for term in cross_modal_contrast(local, shared, previous, options.contrast_tau)]
    if options.distill:
        parts += [options.phi * term for term in distillation(local, shared, options)]
    return torch.stack(parts).sum() if parts else None


def refuse(options: FedUchOptions, context: Context) -> None:
    """Refuse the contrast for bases whose towers have projections of different widths.

    Raises:
        InputError: the contrast is on and the base is one of these.
    """
    if options.contrast and context.objective.base in _UNEQUAL:
        allowed = f"any other than {' and '.join(_UNEQUAL)}, whose towers have projections of different widths"
        raise InputError("objective.base", context.objective.base, f"{allowed}; or protocol.contrast false")


def extra_loss(options: FedUchOptions, context: Context, local: Local, task: Task) -> training.Extra | None:
    """The terms of eq 14 for a task; None if there are none."""
    previous = local.state.get(personal_model.OWN) if _contrasts(options, local.silo) else None
    if previous is None and not options.distill:
        return None
    epochs = context.training.local_epochs
    shared = personal_model.Reference(local, as_tensor(take(task.payloads, Model).buffer), epochs)
    before = None if previous is None else personal_model.Reference(local, previous, epochs)

    def extra(step: training.Step, image: Out | None, text: Out | None) -> Tensor | None:
        return terms((image, text), shared(step), None if before is None else before(step), options)

    return extra


def kept(options: FedUchOptions, local: Local, trained: bool) -> dict[str, Tensor]:
    """The networks after training, which are the previous networks of the next task."""
    # A silo that temporarily lacks a modality keeps its last networks until it can contrast again.
    return personal_model.kept_or_before(local, newest=_contrasts(options, local.silo) and trained)


def _contrasts(options: FedUchOptions, silo: SiloFacts) -> bool:
    return options.contrast and silo.paired


PROTOCOL = variant(FedUchOptions, extra_loss=extra_loss, kept=kept, refuse=refuse)
