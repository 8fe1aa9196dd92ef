"""Ditto: each silo also trains a personal model, which is kept near the global one (Li et al., 2021).

The global model is FedAvg's. In each of its tasks a silo first trains the downloaded model w for FedAvg, then, for as
many epochs, its personal model v_k, which no other silo sees (arXiv 2012.04221, algorithm 1):

v_k ← v_k - η (∇F_k(v_k) + λ (v_k - w))

so that v_k minimises F_k(v) + λ/2 ||v - w||². v_k starts at the initial model. Personal models are evaluated, and the
global model as well. A task takes twice FedAvg's time, which the cost model does not count.

Departures: the gradient above goes to the scenario's optimiser, which the paper assumes to be SGD; with Adam the length
of a step does not grow with λ. λ is the same for all silos and chosen beforehand, as in most of the paper's
experiments; its choice of λ on a silo's validation data is left out. A silo with nothing to minimise keeps v_k. A
silo that has not trained yet is evaluated with the global model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from fedmq.config.sections import NonNegative
from fedmq.federation.protocol import Encoders, Local, Task, Trained, Traits, take
from fedmq.wire.payloads import Model, Payload
from protocols import fedavg
from protocols.parts import personal_model, training

#: Beginning of the names of what the base loss keeps for the personal model.
_PERSONAL = "personal."


@dataclass(frozen=True)
class DittoOptions(fedavg.AnchoredOptions):
    """Options of Ditto, in addition to those of FedAvg.

    Args:
        lambda_v: λ, weight of the distance between the personal and the downloaded model.
    """

    lambda_v: NonNegative = 1.0


class Ditto(fedavg.AnchoredFedAvg):
    """Ditto, see the module docstring."""

    Options: ClassVar[type[Any]] = DittoOptions
    options: DittoOptions

    @classmethod
    def traits_of(cls, options: DittoOptions) -> Traits:
        """FedAvg with personal models."""
        return replace(super().traits_of(options), personalised=True)

    def train(self, local: Local, task: Task) -> Trained:
        """FedAvg's local epochs, then those of the personal model."""
        result = self.trained(local, task)
        return replace(result, state={**result.state, **self._personal(local, task)})

    def _personal(self, local: Local, task: Task) -> dict[str, Tensor]:
        """The personal model after local epochs, and what the base loss keeps for it."""
        before = {name: each for name, each in local.state.items() if name.startswith(_PERSONAL)}
        state = {name.removeprefix(_PERSONAL): each for name, each in before.items()}
        own = personal_model.own_parameters(local)
        downloaded = training.load_model(local, take(task.payloads, Model).buffer)
        work = self.work(replace(local, state=state), task)
        if work is None:
            return {**before, **personal_model.kept_or_before(local, newest=False)}
        local.model.load(own)
        training.train_epochs(local, self.context, task, downloaded, work, lambda_s=self.options.lambda_v / 2)
        kept = {_PERSONAL + name: each for name, each in work.kept().items()}
        return {**kept, **personal_model.kept(local)}

    def encoders(self, local: Local, payloads: Sequence[Payload]) -> Encoders:
        """The personal model; the global one before its first training."""
        return personal_model.last_encoders(local, payloads)


PROTOCOL = Ditto
