"""MOON: FedAvg with a model contrast, towards the global model and away from the silo's last one (Li et al. 2021).

For two towers there is one contrast per modality, summed. The positive is the net of the version the
silo starts from, the negatives are the ends of its own last trainings (one, as in the paper); a silo's first
participation has no negative and skips the term, which would be the constant log 2. Reference nets run in eval mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedmq.federation.protocol import (
    Context,
    Encoders,
    Local,
    MergeResult,
    Reply,
    SiloFacts,
    State,
    Task,
    Trained,
    take,
)
from fedmq.models.two_tower import Out
from fedmq.wire.messages import Delta, Model, Payload
from protocols import _personal_model, _training, fedavg
from protocols._aggregation import as_tensor
from protocols._losses import unit
from protocols._options import check


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


def has_trained(method: fedavg.FedAvg, local: Local, task: Task, trained: Trained) -> bool:
    """Whether a silo trained, so that its model is its own: one with nothing to minimise still holds the download."""
    return bool(take(trained.payloads, Delta).buffer.any()) or method.work(local, task) is not None


class Moon:
    """MOON, see the module's text."""

    Options: ClassVar[type[Any]] = MoonOptions

    def __init__(self, options: MoonOptions, context: Context) -> None:
        self.options = options
        self.fedavg = fedavg.FedAvg(options, context)

    def eligible(self, silo: SiloFacts) -> bool:
        """Everybody takes part."""
        return self.fedavg.eligible(silo)

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """As FedAvg."""
        return self.fedavg.uploads(silo)

    def initial(self, theta: Tensor) -> State:
        """As FedAvg."""
        return self.fedavg.initial(theta)

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """As FedAvg."""
        return self.fedavg.task(state, silo)

    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs on the base loss and the contrast; the model they end in is the next ones' negative.

        A silo that idles keeps what its own last training ended in, if there was any.
        """
        names = (_personal_model.OWN, *(f"{_personal_model.OWN}_{age}" for age in range(1, self.options.buffer)))
        previous = [local.state[name] for name in names if name in local.state]
        trained = self.fedavg.trained(local, task, extra=self._contrast(local, task, previous))
        newest = _personal_model.kept(local) if has_trained(self.fedavg, local, task, trained) else {}
        own = dict(zip(names[len(newest) :], previous, strict=False))
        return replace(trained, state={**trained.state, **newest, **own})

    def _contrast(self, local: Local, task: Task, previous: Sequence[Tensor]) -> _training.Extra | None:
        if not previous or self.options.mu == 0:
            return None
        shared = as_tensor(take(task.payloads, Model).buffer)
        epochs = self.fedavg.context.training.local_epochs
        references = [_personal_model.Reference(local, theta, epochs) for theta in (shared, *previous)]

        def contrast(step: _training.Step, image: Out | None, text: Out | None) -> Tensor:
            terms = []
            by_modality = zip(*(reference(step) for reference in references), strict=True)
            for own, others in zip((image, text), by_modality, strict=True):
                hidden = [other.hidden for other in others if other is not None]
                if own is not None and hidden:
                    terms.append(model_contrast(own.hidden, hidden[0], hidden[1:], self.options.contrast_tau))
            return self.options.mu * torch.stack(terms).sum()

        return contrast

    def merge(self, state: State, replies: Sequence[Reply], round_: int) -> MergeResult:
        """As FedAvg."""
        return self.fedavg.merge(state, replies, round_)

    @property
    def personalised(self) -> bool:
        """If its option says so."""
        return self.options.personal

    def encoders(self, local: Local, payloads: Sequence[Payload]) -> Encoders:
        """The silo's model as its last training left it; the global one before the first."""
        return _personal_model.last_encoders(local, payloads)


PROTOCOL = Moon
