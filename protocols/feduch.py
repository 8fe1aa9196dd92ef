"""FedUCH: unsupervised cross-modal hashing; contrast with and distillation from global networks (Zhu et al., 2023).

FedAvg (eq 3) on an unsupervised base (dgcpn, djsrh or jdsh) with two additional terms (eq 14). Eq 11 pulls the network
of one modality towards the global network of the other modality and away from the silo's previous one; eq 12 pulls its
codes towards the global network's codes of the same modality. The global networks are the downloaded ones, the
previous ones those after the silo's last training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

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
        preset: what is not given: as ``printed`` in the paper, as in the ``released`` code of commit a8cf9ef, which
            trains without the contrast and the distillation, or ``ours``.
    """

    PRESETS: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "printed": {
            "branch_renorm": False,
            "kd_temperature": 1.0,
            "objective.form": "paper",
            "objective.similarity": "codes",
            "objective.binary_steps": False,
            "training.local_epochs": 5,
        },
        "released": {
            "branch_renorm": False,
            "contrast": False,
            "distill": False,
            "training.optimizer": "sgd",
            "training.weight_decay": 5e-4,
            "training.learning_rate": 0.005,
            "training.schedule": "constant",
            "training.warmup_rounds": 0,
            "training.batch_size": 32,
            "training.local_epochs": 5,
        },
        "ours": {},
    }

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
    preset: Literal["printed", "released", "ours"] | None = None


def cross_modal_contrast(
    local: training.Outs, shared: training.Outs, previous: training.Outs, tau: float
) -> list[Tensor]:
    """Eq 11 for each modality: MOON's contrast of its projections with those of the *other* modality of each pair.

    Outputs of the global networks are the positives, those of the silo's previous networks the negatives.
    """
    return [
        model_contrast(mine.hidden, glob.hidden, [old.hidden], tau)
        for mine, glob, old in zip(local, shared[::-1], previous[::-1], strict=True)
        if mine is not None and glob is not None and old is not None
    ]


def distillation(local: training.Outs, shared: training.Outs, options: FedUchOptions) -> list[Tensor]:
    """Eqs 12 and 13 for each modality: distance of the codes in training to the global network's.

    Codes are not distributions; taking the softmax over their bits is our reading.
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


class FedUch(fedavg.AnchoredFedAvg):
    """FedUCH, see the module docstring."""

    Options: ClassVar[type[Any]] = FedUchOptions
    options: FedUchOptions

    def __init__(self, options: FedUchOptions, context: Context) -> None:
        base = context.objective.base
        if options.contrast and base in _UNEQUAL:
            allowed = f"any other than {' and '.join(_UNEQUAL)}, whose towers have projections of different widths"
            raise InputError("objective.base", base, f"{allowed}; or protocol.contrast false")
        super().__init__(options, context)

    @override
    def extra_loss(self, local: Local, task: Task) -> training.Extra | None:
        previous = local.state.get(personal_model.OWN) if self._contrasts(local.silo) else None
        if previous is None and not self.options.distill:
            return None
        epochs = self.context.training.local_epochs
        shared = personal_model.Reference(local, as_tensor(take(task.payloads, Model).buffer), epochs)
        before = None if previous is None else personal_model.Reference(local, previous, epochs)

        def extra(step: training.Step, image: Out | None, text: Out | None) -> Tensor | None:
            return terms((image, text), shared(step), None if before is None else before(step), self.options)

        return extra

    def kept(self, local: Local, *, trained: bool) -> Mapping[str, Tensor]:
        """The networks after training, which are the previous networks of the next task."""
        # A silo that temporarily lacks a modality keeps its last networks until it can contrast again.
        return personal_model.kept_or_before(local, newest=self._contrasts(local.silo) and trained)

    def _contrasts(self, silo: SiloFacts) -> bool:
        return self.options.contrast and silo.paired


PROTOCOL = FedUch
