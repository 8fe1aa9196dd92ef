"""SCAFFOLD: control variates correct the silos' steps for the drift of each (Karimireddy et al., 2020).

Algorithm 1 of arXiv 1910.06378 with its option II. A silo keeps c_i and downloads c, their mean. In a task of K steps
from x to y_i at the rate η it takes

y ← y - η (g_i(y) - c_i + c), then c_i⁺ = c_i - c + (x - y_i) / (K η).

The coordinator adds the mean of y_i - x, with its global step size at 1 as in the paper's experiments, and Σ (c_i⁺ -
c_i) / N to c, over the silos of the merge, N being the number of all silos.

The correction -η (c - c_i) is added to each step of the optimiser. With ``training: {optimizer: sgd, momentum: 0}``,
which the paper assumes, this is the equation above. With momentum or Adam, c_i is the mean of the optimiser's steps
instead of gradients, in the same units as the steps that it corrects; the paper's convergence results do not cover
that. Nothing else changes, so the scenarios' AdamW can be used.

All silos weigh the same, as c is their plain mean: FedAvg's ``weighting: samples`` and ``aggregation.single_weight``
are refused. Everything holds for each branch on its own: N counts the silos that can train the branch, K is the number
of steps in it, and a silo without the modality has neither c_i nor a part in c there. A silo that idles keeps c_i.

The paper's silos upload c_i⁺ - c_i as well. By option II it is -c - (y_i - x) / (K η), so the coordinator computes it
from the update and K: a task has twice FedAvg's parameters (the cost model counts the model alone), and a reply has as
many as FedAvg's. It follows that the update has to arrive as it was trained, so clipping, noise and compression of
updates are refused. Robust rules also apply to c. A reply that is discarded, e.g. as stale, does not count in c; the
silo's next task says so, and the silo returns to the c_i before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedmq.federation.protocol import Context, Local, MergeResult, SiloFacts, State, Task, Trained, Traits, Update, take
from fedmq.federation.updates import read_only
from fedmq.wire.payloads import ControlVariate, Delta, Payload
from protocols import fedavg
from protocols.fednova import ReportsSteps, reported, steps_of
from protocols.parts import aggregation

_CONTROL = "control"
#: int64 [N], 1 + base version of each silo's last reply that c counts; 0 if there is none.
_COUNTED = "counted"
#: Beginning of the names of a silo's control variates float32 [P]; ends in 1 + base version of the task.
_OWN = "control."


@dataclass(frozen=True)
class ScaffoldOptions(fedavg.AnchoredOptions):
    """Options of SCAFFOLD, in addition to those of FedAvg.

    Args:
        weighting: all silos weigh the same.
    """

    weighting: Literal["uniform"] = "uniform"


class Scaffold(ReportsSteps):
    """SCAFFOLD, see the module docstring."""

    Options: ClassVar[type[Any]] = ScaffoldOptions
    options: ScaffoldOptions

    def __init__(self, options: ScaffoldOptions, context: Context) -> None:
        super().__init__(options, context)
        trains = [silo for silo in context.silos if silo.paired or self._single_trains(silo)]
        self.silos = {name: sum(aggregation.owns(silo, name) for silo in trains) for name in self.branches}

    def _single_trains(self, silo: SiloFacts) -> bool:
        return self.eligible(silo) and (self.base is not None or self.options.single_modality == "anchor")

    @classmethod
    def traits_of(cls, options: ScaffoldOptions) -> Traits:
        """Silos have no weights; c follows from updates as they were trained."""
        return Traits(weighs_single_silos=False, exact_updates=True)

    def initial(self, theta: Tensor) -> State:
        """FedAvg's, and c = 0."""
        first, count = super().initial(theta), len(self.context.silos)
        own = {_CONTROL: torch.zeros_like(theta), _COUNTED: torch.zeros(count, dtype=torch.int64)}
        return replace(first, tensors={**first.tensors, **own})

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """FedAvg's, and c."""
        control, counted = state.tensors[_CONTROL].numpy(), int(state.tensors[_COUNTED][silo.index])
        return (*super().task(state, silo), ControlVariate(self.context.layout.digest, control, counted))

    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs with corrected steps; keeps the new c_i, and the one before until c counts this reply."""
        received = take(task.payloads, ControlVariate)
        control, counted = aggregation.as_tensor(received.buffer), received.counted
        kept = {name: each for name, each in local.state.items() if name.startswith(_OWN)}
        kept = {name: each for name, each in kept.items() if int(name.removeprefix(_OWN)) >= counted}
        own = kept.get(f"{_OWN}{counted}", torch.zeros_like(control))
        correction = task.learning_rate * (own - control)
        result = self.trained(local, task, correction=correction.to(local.model.flat.device))
        delta, steps = read_only(take(result.payloads, Delta).buffer), reported(result.payloads)
        kept[f"{_OWN}{task.base_version + 1}"] = own + self._change(control, delta, steps, task.learning_rate)
        return replace(result, state={**result.state, **kept})

    def _change(self, control: Tensor, delta: Tensor, steps: Mapping[str, int], rate: float) -> Tensor:
        """c_i⁺ - c_i = -c - (y_i - x) / (K η), float32 [P]; zero in branches without steps.

        Args:
            control: c [P].
            delta: y_i - x [P].
            steps: K of each branch.
            rate: η.
        """
        change = torch.zeros_like(control)
        for name, part in self.branches.items():
            if steps[name]:
                change[part] = -control[part] - delta[part] / (steps[name] * rate)
        return change

    def merge(self, state: State, replies: Sequence[Update], round_: int) -> MergeResult:
        """FedAvg's merge; adds the change of the silos' control variates to c."""
        merged, training_ = super().merge(state, replies, round_), self.context.training
        total, counted = state.tensors[_CONTROL].double(), state.tensors[_COUNTED].clone()
        for reply in replies:
            base, silo = state if reply.base is None else reply.base, reply.silo.index
            if base.tensors[_COUNTED][silo] != counted[silo]:
                continue  # c counts a reply that the silo sent after it was given this task: c_i has changed since
            rate = training_.rate_at(reply.base_version, self.context.rounds)
            change = self._change(base.tensors[_CONTROL], reply.delta, steps_of(reply), rate)
            for name, part in self.branches.items():
                total[part] += change[part].double() / max(1, self.silos[name])
            counted[silo] = reply.base_version + 1
        tensors = {**merged.state.tensors, _CONTROL: total.float(), _COUNTED: counted}
        return replace(merged, state=replace(merged.state, tensors=tensors))


PROTOCOL = Scaffold
