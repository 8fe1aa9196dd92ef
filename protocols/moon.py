"""MOON: FedAvg with a model contrast, towards the global model and away from the silo's last one (Li et al. 2021).

For two towers there is one contrast per modality, summed. The positive is the net of the version the
silo starts from, the negatives are the ends of its own last trainings (one, as in the paper); a silo's first
participation has no negative and skips the term, which would be the constant log 2. Reference nets run in eval mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedmq.federation.protocol import Context, Local, Task, Traits, take
from fedmq.models.two_tower import Out
from fedmq.wire.messages import Model
from protocols import _personal_model, _training, fedavg
from protocols._aggregation import as_tensor
from protocols._losses import unit
from protocols._options import check
from protocols._variant import variant


@dataclass(frozen=True)
class MoonOptions(fedavg.FedAvgOptions):
    """Options of MOON: FedAvg's and

    Args:
        mu: weight of the contrast; 0 is FedAvg.
        contrast_tau: its temperature.
        buffer: so many of a silo's last models are contrasted with; each is a whole model in the silo's memory.
        personal: silos are measured by their own models as their last training left them, not by the global one.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **fedavg.FedAvgOptions.OF,
        "mu": ("contrast_tau", "buffer"),
    }

    mu: float = 1.0
    contrast_tau: float = 0.5
    buffer: int = 1
    personal: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check("mu", self.mu, 0.0)
        check("contrast_tau", self.contrast_tau, 0.0, open_low=True)
        check("buffer", self.buffer, 1, 100)


def model_contrast(z: Tensor, shared: Tensor, previous: Sequence[Tensor], tau: float) -> Tensor:
    """Cross-entropy over [cos(z, z_glob), cos(z, z_prev), ...] / tau with class 0 right (MOON, eq 3).

    Args:
        z: [B, h] projections of a batch.
        shared: [B, h] the global model's of the same batch.
        previous: [B, h] each, the previous local models'.
        tau: temperature.
    """
    z = unit(z)
    logits = torch.stack([(z * unit(each)).sum(-1) for each in (shared, *previous)], dim=1) / tau
    return (logits.logsumexp(1) - logits[:, 0]).mean()


def previous_models(options: MoonOptions, local: Local) -> list[Tensor]:
    """The silo's own models [P] after its last trainings, newest first."""
    return [local.state[name] for name in _names(options) if name in local.state]


def contrast(options: MoonOptions, context: Context, local: Local, task: Task) -> _training.Extra | None:
    """The contrast of a batch; None at a silo's first participation, or without weight."""
    previous = previous_models(options, local)
    if not previous or options.mu == 0:
        return None
    shared = as_tensor(take(task.payloads, Model).buffer)
    epochs = context.training.local_epochs
    references = [_personal_model.Reference(local, theta, epochs) for theta in (shared, *previous)]

    def extra(step: _training.Step, image: Out | None, text: Out | None) -> Tensor:
        terms = []
        by_modality = zip(*(reference(step) for reference in references), strict=True)
        for own, others in zip((image, text), by_modality, strict=True):
            hidden = [other.hidden for other in others if other is not None]
            if own is not None and hidden:
                terms.append(model_contrast(own.hidden, hidden[0], hidden[1:], options.contrast_tau))
        return options.mu * torch.stack(terms).sum()

    return extra


def kept(options: MoonOptions, local: Local, trained: bool) -> dict[str, Tensor]:
    """The model that training ended in, the next tasks' negative, before the older ones.

    A silo that idles keeps what its own last training ended in, if there was any.
    """
    newest, names = _personal_model.kept(local) if trained else {}, _names(options)
    return {**newest, **dict(zip(names[len(newest) :], previous_models(options, local), strict=False))}


def _names(options: MoonOptions) -> tuple[str, ...]:
    """Names of the models that a silo keeps, newest first."""
    return (_personal_model.OWN, *(f"{_personal_model.OWN}_{age}" for age in range(1, options.buffer)))


PROTOCOL = variant(
    MoonOptions,
    extra_loss=contrast,
    kept=kept,
    traits=lambda options: Traits(personalised=options.personal),
    encoders=_personal_model.last_encoders,
)
