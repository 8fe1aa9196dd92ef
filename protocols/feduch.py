"""FedUCH: unsupervised cross-modal hashing, contrasted and distilled with the global nets (Zhu et al. 2023).

FedAvg (eq 3) on an unsupervised base (dgcpn, djsrh or jdsh) with two terms of its own (eq 14): the local
net of one modality is drawn to the global net of the other and away from the silo's last one of the other (eq 11), and
its codes to the global net's codes of the same modality (eq 12). The global net is that of the version the silo starts
from, the last one the end of its own last training; a first participation has none and skips eq 11, which would be the
constant log 2. Where a base takes several updates per batch, both terms are in the first. A silo with one modality has
no pairs to contrast and keeps eq 12.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedmq.errors import InputError
from fedmq.federation.protocol import Context, Local, SiloFacts, Task, take
from fedmq.models.two_tower import Out
from fedmq.wire.messages import Model
from protocols import _personal_model, _training, fedavg
from protocols._aggregation import as_tensor
from protocols._options import check
from protocols._similarity import mean_square
from protocols._variant import variant
from protocols.fedmekt import divergence
from protocols.moon import model_contrast

#: Bases whose two towers' projections cannot be contrasted with each other.
_UNEQUAL = ("dcmh", "shdch")


@dataclass(frozen=True)
class FedUchOptions(fedavg.FedAvgOptions):
    """Options of FedUCH: FedAvg's and

    Args:
        contrast: the contrast between modalities (eq 11); FedUCH-1 and -3 lack it.
        distill: the distillation within a modality (eq 12); FedUCH-1 and -2 lack it.
        mu: weight of the contrast, of ``contrast`` alone (IAPR 0.5, COCO 0.4, NUS-WIDE 0.3).
        phi: weight of the distillation, of ``distill`` alone (IAPR 0.5, COCO 0.7, NUS-WIDE 0.7).
        contrast_tau: temperature of the contrast, tau of eq 11; ``tau`` is that of info_nce.
        kd: distance of the distillation: ``kl`` of softmaxed codes, as eq 13 names it, or ``mse`` of the codes.
        kd_temperature: of ``kl``, as the released code sets it.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **fedavg.FedAvgOptions.OF,
        "contrast": ("mu", "contrast_tau"),
        "distill": ("phi", "kd", "kd_temperature"),
        "kd=kl": ("kd_temperature",),
    }

    contrast: bool = True
    distill: bool = True
    mu: float = 0.6
    phi: float = 0.4
    contrast_tau: float = 1.0
    kd: Literal["kl", "mse"] = "kl"
    kd_temperature: float = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check("mu", self.mu, 0.0)
        check("phi", self.phi, 0.0)
        check("contrast_tau", self.contrast_tau, 0.0, open_low=True)
        check("kd_temperature", self.kd_temperature, 0.0, open_low=True)


def cross_modal_contrast(
    own: _training.Outs, shared: _training.Outs, previous: _training.Outs, tau: float
) -> list[Tensor]:
    """Eq 11 for each modality: MOON's contrast of its projections with those of the *other* modality of each pair.

    Args:
        own: image and text outputs of the nets that are trained.
        shared: of the global nets, the positives.
        previous: of the silo's previous nets, the negatives.
        tau: temperature.
    """
    return [
        model_contrast(mine.hidden, glob.hidden, [old.hidden], tau)
        for mine, glob, old in zip(own, shared[::-1], previous[::-1], strict=True)
        if mine is not None and glob is not None and old is not None
    ]


def distillation(own: _training.Outs, shared: _training.Outs, options: FedUchOptions) -> list[Tensor]:
    """Eqs 12 and 13 for each modality: its codes against the global net's.

    Codes are no distributions; the softmax over their bits is our reading.

    Args:
        own: image and text outputs of the nets that are trained.
        shared: of the global nets.
        options: form and temperature.
    """
    pairs = [
        (mine.code, glob.code) for mine, glob in zip(own, shared, strict=True) if mine is not None and glob is not None
    ]
    if options.kd == "mse":
        return [mean_square(mine, glob) for mine, glob in pairs]
    return [divergence(mine, glob, options.kd_temperature) for mine, glob in pairs]


def terms(
    own: _training.Outs, shared: _training.Outs, previous: _training.Outs | None, options: FedUchOptions
) -> Tensor | None:
    """What eq 14 adds to the base, mu J_CR + phi J_KD, for one batch and the silo's modalities; None for nothing.

    Args:
        own: image and text outputs of the nets that are trained.
        shared: of the global nets.
        previous: of the silo's previous nets; None at its first participation or without contrast.
        options: weights and switches.
    """
    found: list[Tensor] = []
    if previous is not None:
        found += [options.mu * each for each in cross_modal_contrast(own, shared, previous, options.contrast_tau)]
    if options.distill:
        found += [options.phi * each for each in distillation(own, shared, options)]
    return torch.stack(found).sum() if found else None


def refuse(options: FedUchOptions, context: Context) -> None:
    """Refuse the contrast where projections of the two towers have different widths.

    Raises:
        InputError: the base is one of these.
    """
    if options.contrast and context.objective.base in _UNEQUAL:
        allowed = f"any other than {' and '.join(_UNEQUAL)}, whose towers have projections of different widths"
        raise InputError("objective.base", context.objective.base, f"{allowed}; or protocol.contrast false")


def extra_loss(options: FedUchOptions, context: Context, local: Local, task: Task) -> _training.Extra | None:
    """What eq 14 adds to the base in a task; None for nothing."""
    previous = local.state.get(_personal_model.OWN) if _contrasts(options, local.silo) else None
    if previous is None and not options.distill:
        return None
    epochs = context.training.local_epochs
    shared = _personal_model.Reference(local, as_tensor(take(task.payloads, Model).buffer), epochs)
    before = None if previous is None else _personal_model.Reference(local, previous, epochs)

    def extra(step: _training.Step, image: Out | None, text: Out | None) -> Tensor | None:
        return terms((image, text), shared(step), None if before is None else before(step), options)

    return extra


def kept(options: FedUchOptions, local: Local, trained: bool) -> dict[str, Tensor]:
    """The nets that training ended in, which are the next task's previous nets."""
    # A silo that contrasts nothing for now, a modality being lost, keeps its last nets for when that is back.
    return _personal_model.kept_or_before(local, newest=_contrasts(options, local.silo) and trained)


def _contrasts(options: FedUchOptions, silo: SiloFacts) -> bool:
    return options.contrast and silo.paired


PROTOCOL = variant(FedUchOptions, extra_loss=extra_loss, kept=kept, refuse=refuse)
