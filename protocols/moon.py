"""MOON: FedAvg with a contrast towards the global model and away from the silo's previous one (Li et al., 2021).

A silo minimises its base loss plus mu times the contrast (eqs 3 and 4): the cross-entropy over [cos(z, z_glob),
cos(z, z_prev), ...] / tau with the first as the target, the mean over the batch, tau = 0.5. The positive is the
downloaded model, the negatives are the silo's models after its last trainings (``buffer``, one in the paper), all in
eval mode and without gradient. They belong to the silo's personal state, which is kept between rounds and after a
restart. mu is 1, the default of the code (QinbinLi/MOON); the paper tunes it among 0.1, 1, 5 and 10.

Departures: each of the two towers has its contrast, and both are summed. z is the tower's projection: with ``info_nce``
the embedding itself, as there is no classifier behind it. A silo without a previous model skips the term. So does the
code in the first round; a silo that it first selects later has its random initial network as the negative there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedmq.config.sections import NonNegative, Positive
from fedmq.federation.protocol import Context, Encoders, Local, Task, Traits, take
from fedmq.models.two_tower import Out
from fedmq.wire.payloads import Model, Payload
from protocols import fedavg
from protocols.parts import personal_model, training
from protocols.parts.aggregation import as_tensor
from protocols.parts.losses import unit


@dataclass(frozen=True)
class MoonOptions(fedavg.AnchoredOptions):
    """Options of MOON, in addition to those of FedAvg.

    Args:
        mu: weight of the contrast; 0 gives FedAvg.
        contrast_tau: temperature of the contrast.
        buffer: number of previous local models used as negatives; the silo keeps a full copy of each.
        personal: evaluate each silo's personal model as of its last training, not the global model.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {**fedavg.AnchoredOptions.OF, "mu": ("contrast_tau", "buffer")}

    mu: NonNegative = 1.0
    contrast_tau: Positive = 0.5
    buffer: Annotated[int, Field(ge=1, le=100)] = 1
    personal: bool = False


def model_contrast(z: Tensor, shared: Tensor, previous: Sequence[Tensor], tau: float) -> Tensor:
    """Cross-entropy over [cos(z, z_glob), cos(z, z_prev), ...] / tau with class 0 as the target (MOON, eq 3).

    Args:
        z: [B, h] projections of a batch.
        shared: [B, h] projections of the same batch by the global model.
        previous: [B, h] each, projections by the previous local models.
        tau: temperature.
    """
    z = unit(z)
    logits = torch.stack([(z * unit(projection)).sum(-1) for projection in (shared, *previous)], dim=1) / tau
    return (logits.logsumexp(1) - logits[:, 0]).mean()


class Moon(fedavg.AnchoredFedAvg):
    """MOON, see the module docstring."""

    Options: ClassVar[type[Any]] = MoonOptions
    options: MoonOptions

    def __init__(self, options: MoonOptions, context: Context) -> None:
        super().__init__(options, context)
        # State names of the models that a silo keeps, newest first.
        self.names = (personal_model.OWN, *(f"{personal_model.OWN}_{age}" for age in range(1, options.buffer)))

    @classmethod
    def traits_of(cls, options: MoonOptions) -> Traits:
        """Personal models by option."""
        return Traits(personalised=options.personal)

    def previous(self, local: Local) -> list[Tensor]:
        """The silo's models [P] after its last trainings, newest first."""
        return [local.state[name] for name in self.names if name in local.state]

    @override
    def extra_loss(self, local: Local, task: Task) -> training.Extra | None:
        previous, options = self.previous(local), self.options
        if not previous or options.mu == 0:
            return None
        shared = as_tensor(take(task.payloads, Model).buffer)
        epochs = self.context.training.local_epochs
        references = [personal_model.Reference(local, theta, epochs) for theta in (shared, *previous)]

        def extra(step: training.Step, image: Out | None, text: Out | None) -> Tensor:
            terms = []
            by_modality = zip(*(reference(step) for reference in references), strict=True)
            for trained, others in zip((image, text), by_modality, strict=True):
                hidden = [other.hidden for other in others if other is not None]
                if trained is not None and hidden:
                    terms.append(model_contrast(trained.hidden, hidden[0], hidden[1:], options.contrast_tau))
            return options.mu * torch.stack(terms).sum()

        return extra

    def kept(self, local: Local, *, trained: bool) -> Mapping[str, Tensor]:
        """The negatives of later tasks; an idle silo keeps the models of its previous trainings."""
        newest = personal_model.kept(local) if trained else {}
        return {**newest, **dict(zip(self.names[len(newest) :], self.previous(local), strict=False))}

    @override
    def encoders(self, local: Local, payloads: Sequence[Payload]) -> Encoders:
        return personal_model.last_encoders(local, payloads)


PROTOCOL = Moon
