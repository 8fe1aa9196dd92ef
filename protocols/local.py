"""Local: every silo trains its personal model without aggregation; the baseline that federation has to beat.

A silo resumes training from the model of its last task. It downloads nothing and uploads only its loss. A silo with one
modality has nothing to minimise under InfoNCE and keeps the initial model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from fedmq.federation.protocol import (
    Context,
    Encoders,
    FederatedProtocol,
    Local,
    MergeResult,
    SiloFacts,
    State,
    Task,
    Trained,
    Traits,
    Update,
)
from fedmq.wire.payloads import Loss, Payload
from protocols import fedavg
from protocols.parts import personal_model, training
from protocols.parts.losses import TauOptions


class Alone(FederatedProtocol):
    """Local training, see the module docstring; FedProto adds prototypes to it."""

    Options: ClassVar[type[Any]] = TauOptions

    def __init__(self, options: TauOptions, context: Context) -> None:
        super().__init__(options, context)
        self.fedavg = fedavg.FedAvg(fedavg.FedAvgOptions(tau=options.tau), context)

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The loss, for the log."""
        return frozenset({Loss})

    def initial(self, theta: Tensor) -> State:
        """The initial model, which never changes."""
        return State(theta)

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """Nothing: every silo derives the same initial model from the seed."""
        return ()

    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs on the base loss."""
        return self.trained(local, task)

    def trained(
        self, local: Local, task: Task, *, extra: training.Extra | None = None, otherwise: training.Work | None = None
    ) -> Trained:
        """Local epochs from the silo's personal parameters, which it keeps.

        ``extra`` is a method's loss term, ``otherwise`` the work of a silo for which the base loss has nothing to
        minimise.
        """
        local.model.load(personal_model.own_parameters(local))
        base = local.model.flat.detach().clone()
        work = self.fedavg.work(local, task) or otherwise
        outcome = training.train_epochs(local, self.context, task, base, work, extra=extra, resumable=True)
        state = {**({} if work is None else work.kept()), **personal_model.kept(local)}
        return Trained((Loss(outcome.loss),), state, outcome.loss)

    def merge(self, state: State, replies: Sequence[Update], round_: int) -> MergeResult:
        """Nothing to merge."""
        return MergeResult(state)

    @classmethod
    def traits_of(cls, options: Any) -> Traits:
        """The coordinator's model keeps its initial values; personal models are evaluated; no reply has a weight."""
        return Traits(personal_only=True, personalised=True, weighs_single_silos=False)

    def encoders(self, local: Local, payloads: Sequence[Payload]) -> Encoders:
        """The silo's personal model."""
        return personal_model.encoders_of(local, personal_model.own_parameters(local))


PROTOCOL = Alone
