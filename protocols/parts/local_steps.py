"""The numbers of optimiser steps that silos report, for merges that depend on them (SCAFFOLD, FedNova)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedmq.errors import RemoteWireError
from fedmq.federation.protocol import SiloFacts, Update, take
from fedmq.wire.payloads import Delta, LocalSteps, PartialDelta, Payload
from protocols import fedavg
from protocols.parts import training
from protocols.parts.aggregation import owns

#: Branches in the order of the payload.
_BRANCHES = ("image", "text", "shared")
#: Maximum number of steps of a branch in each batch: DGCPN takes two.
_IN_BATCH = 2


def reported(payloads: Sequence[Payload]) -> dict[str, int]:
    """The steps of each branch that a reply's payloads report."""
    return dict(zip(_BRANCHES, take(payloads, LocalSteps).values.tolist(), strict=True))


def steps_of(reply: Update) -> dict[str, int]:
    """The steps of each branch that a reply reports, 0 for a branch that its silo cannot train."""
    return {name: steps * owns(reply.silo, name) for name, steps in reported(reply.payloads).items()}


class ReportsSteps(fedavg.AnchoredFedAvg):
    """FedAvg whose silos also report their numbers of steps."""

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """FedAvg's, and the numbers of steps."""
        return super().uploads(silo) | {LocalSteps}

    def statistics(self, outcome: training.TrainingResult) -> tuple[Payload, ...]:
        """FedAvg's, and the steps of each branch."""
        steps = np.array([outcome.steps.get(name, 0) for name in _BRANCHES], np.int64)
        return (*super().statistics(outcome), LocalSteps(steps))

    def check(self, payloads: Sequence[Payload]) -> None:
        """Check the reported steps against the number of items that the update was trained on.

        Raises:
            RemoteWireError: more steps than these items have batches; with a false number a silo could scale the merge.
        """
        settings = self.context.training
        samples = next(each.n_samples for each in payloads if isinstance(each, Delta | PartialDelta))
        found, batches = max(reported(payloads).values()), -(-samples // settings.batch_size)
        if found > (most := _IN_BATCH * settings.local_epochs * batches):
            raise RemoteWireError("malformed", f"{found} local steps on {samples} items, allowed: at most {most}")
