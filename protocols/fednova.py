"""FedNova: updates are divided by their silos' numbers of steps before they are averaged (Wang et al., 2020).

Silos of different sizes take different numbers of steps, and FedAvg favours those that take many. FedNova's rule
(arXiv 2007.07481, section "FedNova"), applied to each branch, is

θ ← θ + τ_eff Σ_i p_i Δ_i / |a_i|, τ_eff = Σ_i p_i |a_i|

with p_i = n_i / n over the silos that trained the branch, and |a_i| the sum of the factors with which the gradients of
the task's steps enter Δ_i. For τ_i steps of SGD it is τ_i, with momentum ρ it is Σ_k (1 - ρ^k) / (1 - ρ) over k from 1
to τ_i. Silos report τ_i of each branch. τ_eff is that of the released code (JYWa/FedNova); the paper allows others.

If all silos take the same number of steps, FedNova is FedAvg: it needs silos of different sizes
(``partition.sizes: proportional`` or ``dirichlet``), and ``aggregation.mode: sync`` or ``buffered``, as a merge of one
reply has nothing to compare. With steps in proportion to samples, and ``weighting: samples``, all updates count alike.

Departures: the paper has no case of Adam, whose steps are not linear in the gradients. |a_i| is τ_i then: each step of
Adam has about the same length, whatever the gradient. The proximal variant and the coordinator's momentum are left out.
A branch is averaged over the silos that trained it, each with its own τ_i; the paper has no branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from fedmq.errors import RemoteWireError
from fedmq.federation.protocol import MergeResult, SiloFacts, State, Update, take
from fedmq.wire.payloads import Delta, LocalSteps, PartialDelta, Payload
from protocols import fedavg
from protocols.parts import aggregation, training
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


def gradient_weight(steps: int, momentum: float) -> float:
    """|a_i|: sum of the weights of the gradients of SGD's τ_i steps in the update.

    The momentum ρ is 0 for SGD without momentum and for Adam.
    """
    velocity = total = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1.0
        total += velocity
    return total


class FedNova(ReportsSteps):
    """FedNova, see the module docstring."""

    def merge(self, state: State, replies: Sequence[Update], round_: int) -> MergeResult:
        """FedAvg's merge of the updates, each scaled by τ_eff / |a_i| in each branch."""
        return super().merge(state, self.scaled(replies), round_)

    def scaled(self, replies: Sequence[Update]) -> list[Update]:
        """The replies with scaled updates; a branch without steps becomes 0."""
        options, momentum = self.context.training, 0.0
        if options.optimizer == "sgd":
            momentum = options.momentum
        rows = aggregation.branch_rows(replies, self.weights(replies), self.branches, True)
        changes = [reply.delta.clone() for reply in replies]
        for name, part in self.branches.items():
            lengths = torch.tensor(
                [gradient_weight(steps_of(reply)[name], momentum) for reply in replies], dtype=torch.float64
            )
            effective = float(aggregation.damped(rows[name], (lengths > 0).double()) @ lengths)
            for change, length in zip(changes, lengths.tolist(), strict=True):
                change[part] *= effective / length if length else 0.0
        return [
            replace(reply, payloads=tuple(self._with(change, each) for each in reply.payloads))
            for reply, change in zip(replies, changes, strict=True)
        ]

    def _with(self, change: torch.Tensor, payload: Payload) -> Payload:
        return replace(payload, buffer=change.numpy()) if isinstance(payload, Delta) else payload


PROTOCOL = FedNova
