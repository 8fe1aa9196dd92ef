"""How much a method's update of one task differs from FedAvg's, as a table.

    python -m benchmarks.update_distances scenarios/rcsr_mr50.yaml [--set training.local_epochs=8 ...] [--merges 2]

A method whose update is FedAvg's to a thousandth is FedAvg under another name. For each method, all eligible silos
train and are merged ``--merges`` times. Then each of them trains once more from the same parameters, with the same
batches, by the method and by FedAvg. The table has |u - u_FedAvg| / |u_FedAvg| of the change of the whole model at a
silo, personal layers included: the median and the range over silos with both modalities and over those with one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import protocols
from fedmq.config.resolve import load
from fedmq.config.scenario import ProtocolChoice, Scenario
from fedmq.federation.population import Population, build_population
from fedmq.federation.protocol import Context, FederatedProtocol, Local, SiloFacts, State, Task, Trained, Update, take
from fedmq.models.two_tower import TwoTower
from fedmq.wire.payloads import Model
from protocols.fedavg import AnchoredFedAvg
from protocols.parts.personal_model import PartialFedAvg
from protocols.parts.training import batch_count

#: Methods of the table, each as settings of a scenario.
METHODS = {
    "fedmekt": ["protocol=fedmekt"],
    "pfedmma": ["protocol=pfedmma", "backbone.adapter=mma", "backbone.bottleneck=32"],
    "mfcpl": ["protocol=mfcpl"],
    "moon": ["protocol=moon"],
    "creamfl": ["protocol=creamfl"],
    "fedprox": ["protocol=fedprox"],
    "fedcola": ["protocol=fedcola"],
    "rcsr-p": ["protocol={name: rcsr, personal: router, personal_onset: 0}"],
}


@dataclass
class Federation:
    """The silos of a scenario, which train in turn in this process."""

    scenario: Scenario
    population: Population
    context: Context
    model: TwoTower
    method: FederatedProtocol
    state: State  # the coordinator's state
    personal: dict[int, dict[str, Tensor]]  # the silos' personal tensors, by silo
    version: int = 0

    @classmethod
    def of(cls, scenario: Scenario) -> Federation:
        """The federation before the first round."""
        population = build_population(scenario)
        model = population.build_model(scenario, "cpu", ("image", "text"))
        context = population.context(scenario, model)
        method = protocols.create(scenario.protocol, context)
        return cls(scenario, population, context, model, method, method.initial(model.initial()), {})

    @property
    def silos(self) -> list[SiloFacts]:
        """The silos that the method selects and that have items."""
        silos = filter(self.method.eligible, self.context.silos)
        return [silo for silo in silos if len(self.population.rows_of(silo).dataset) > 1]

    def local(self, silo: SiloFacts) -> Local:
        """What a silo trains with."""
        rows = self.population.rows_of(silo).dataset
        dataset = self.population.load(rows, image=silo.image, text=silo.text)
        return Local(silo, dataset, self.model, self.personal.get(silo.index, {}))

    def task(self, silo: SiloFacts) -> Task:
        """Its next task."""
        rate = self.scenario.training.learning_rate  # without the warm-up, so that all rounds move
        return Task(self.version + 1, self.version, self.version, rate, self.method.task(self.state, silo))

    def merge(self) -> None:
        """One round of all silos."""
        replies = []
        for silo in self.silos:
            trained: Trained = self.method.train(self.local(silo), self.task(silo))
            self.personal[silo.index] = dict(trained.state)
            replies.append(Update(silo, self.version + 1, self.version, 0, 1.0, trained.payloads))
        self.state, self.version = self.method.merge(self.state, replies, self.version).state, self.version + 1

    def differences(self) -> Iterator[tuple[SiloFacts, float]]:
        """Each silo, and |u - u_FedAvg| / |u_FedAvg| of its next task; silos that FedAvg does not move are left out."""
        fedavg = protocols.create(ProtocolChoice(name="fedavg"), self.context)
        assert isinstance(fedavg, AnchoredFedAvg)
        for silo in self.silos:
            local, task = self.local(silo), self.task(silo)
            start = self._start(local, task)
            self.method.train(local, task)
            update = self.model.flat.detach() - start
            model = Model(self.context.layout.digest, start.numpy())
            fedavg.train(local, replace(task, payloads=(model, *fedavg.anchoring.download(self.state.tensors))))
            plain = self.model.flat.detach() - start
            if bool(plain.any()):
                yield silo, float((update - plain).norm() / plain.norm())

    def _start(self, local: Local, task: Task) -> Tensor:
        """The parameters from which a silo starts its task [P]."""
        if isinstance(self.method, PartialFedAvg):
            return self.method.parameters(local, task.payloads).clone()
        return torch.from_numpy(take(task.payloads, Model).buffer.copy())


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2%} ({min(values):.2%} to {max(values):.2%})" if values else "none trains"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.update_distances", description="Compare updates with FedAvg's."
    )
    parser.add_argument("scenario", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of the scenario")
    parser.add_argument("--merges", type=int, default=2, help="merges before the update that is measured")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("method", "steps a task", "silos with both modalities", "silos with one")
    for name in arguments.only:
        federation = Federation.of(load(arguments.scenario, [*METHODS[name], *arguments.set]))
        for _ in range(arguments.merges):
            federation.merge()
        found = list(federation.differences())
        training = federation.context.training
        sizes = [len(federation.population.rows_of(silo).dataset) for silo, _ in found]
        steps = [training.local_epochs * batch_count(size, training.batch_size) for size in sizes]
        spreads = [_spread([value for silo, value in found if silo.paired is paired]) for paired in (True, False)]
        table.add_row(name, f"{min(steps)} to {max(steps)}", *spreads)
    Console().print(table)


if __name__ == "__main__":
    main()
