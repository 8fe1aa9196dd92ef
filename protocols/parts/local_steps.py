"""The numbers of optimiser steps that silos report, for merges that depend on them (SCAFFOLD, FedNova)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedmq.config.scenario import Training
from fedmq.errors import RemoteWireError
from fedmq.federation.protocol import Update, take
from fedmq.wire.payloads import Delta, LocalSteps, PartialDelta, Payload
from protocols.parts.aggregation import owns

#: Branches in the order of the payload.
_BRANCHES = ("image", "text", "shared")
#: Maximum number of steps of a branch in each batch: DGCPN takes two.
_IN_BATCH = 2


def payload(steps: Mapping[str, int]) -> LocalSteps:
    """The report of the steps of each branch."""
    return LocalSteps(np.array([steps.get(name, 0) for name in _BRANCHES], np.int64))


def reported(payloads: Sequence[Payload]) -> dict[str, int]:
    """The steps of each branch that a reply's payloads report."""
    return dict(zip(_BRANCHES, take(payloads, LocalSteps).values.tolist(), strict=True))


def steps_of(reply: Update) -> dict[str, int]:
    """The steps of each branch that a reply reports, 0 for a branch that its silo cannot train."""
    return {name: steps * owns(reply.silo, name) for name, steps in reported(reply.payloads).items()}


def check(payloads: Sequence[Payload], training: Training) -> None:
    """Check the reported steps against the number of items that a reply's update was trained on.

    Raises:
        RemoteWireError: more steps than these items have batches; with a false number a silo could scale the merge.
    """
    samples = next(each.n_samples for each in payloads if isinstance(each, Delta | PartialDelta))
    found, batches = max(reported(payloads).values()), -(-samples // training.batch_size)
    if found > (most := _IN_BATCH * training.local_epochs * batches):
        raise RemoteWireError("malformed", f"{found} local steps on {samples} items, allowed: at most {most}")
