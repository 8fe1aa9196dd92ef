"""What a coordinator works with, put together once from the scenario and fixed for the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from coordinator.cost import CostModel
from coordinator.events import Action, Send
from coordinator.participation import Trace, sampling_of
from coordinator.rounds import RoundsPlan
from fedmq.config.scenario import Scenario
from fedmq.federation.fault_effects import TaskOutcome
from fedmq.federation.fault_schedule import FaultSchedule
from fedmq.federation.protocol import Context, FederatedProtocol, SiloFacts, Traits
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.messages import TaskInfo


@dataclass(frozen=True)
class RunContext:
    """What the loop works with; fixed for the run.

    Args:
        scenario: as resolved.
        protocol: the method.
        context: facts for both halves of it.
        samples: training samples of each silo, in silo order: bounds of what it may claim, its weight where silos are
            drawn by size, and its work in virtual time and in the order of tasks.
        cost: of tasks in virtual time.
        folder: the run folder.
        trace: when each silo is on.
        data: digest of the prepared data.
        trace_file: digest of the file that ``trace`` was read from; empty for none.
    """

    scenario: Scenario
    protocol: FederatedProtocol
    context: Context
    samples: tuple[int, ...]
    cost: CostModel
    folder: RunFolder
    trace: Trace = field(default_factory=Trace)
    data: str = ""
    trace_file: str = ""

    @cached_property
    def script(self) -> FaultSchedule:
        """The scenario's faults."""
        return FaultSchedule(self.scenario.faults, self.scenario.seed, self.context.silos)

    @cached_property
    def _silos(self) -> dict[str, SiloFacts]:
        return {silo.name: silo for silo in self.context.silos}

    def facts_at(self, name: str, version: int) -> SiloFacts:
        """A silo as it is at a version; only faults change it."""
        return self.script.facts(self._silos[name], version)

    @cached_property
    def plan(self) -> RoundsPlan:
        """The rounds machine's share of the scenario."""
        silos, participation, aggregation = self.context.silos, self.scenario.participation, self.scenario.aggregation
        eligible = tuple(
            silo.name
            for silo in silos
            if any(self.protocol.eligible(state) for state in self.script.phases(silo, self.scenario.rounds))
        )
        samples = {silo.name: self.samples[silo.index] for silo in silos}
        patience = {"sync": aggregation.deadline, "buffered": aggregation.timeout, "async": None}
        return RoundsPlan(
            seed=self.scenario.seed,
            rounds=self.scenario.rounds,
            silos=tuple(silo.name for silo in silos),
            eligible=eligible,
            participation=participation.rate,
            sampling=sampling_of(participation, samples),
            mode=aggregation.mode,
            quorum=aggregation.quorum,
            over_select=aggregation.over_select,
            buffer=aggregation.buffer,
            patience=patience[aggregation.mode],
            max_staleness=aggregation.max_staleness,
            first_round_selects_all=self.traits.first_round_selects_all,
        )

    @cached_property
    def traits(self) -> Traits:
        """What the method says of itself."""
        return self.protocol.traits()

    @property
    def gives_up(self) -> bool:
        """Whether a silo that stays away is given up; by default only where time is real."""
        chosen = self.scenario.aggregation.on_lost
        return self.scenario.clock == "wall" if chosen is None else chosen == "give_up"

    def task_info(self, round_: int, settled: int) -> TaskInfo:
        """What a task of a round says of itself; ``settled`` is the silo's task up to which it may forget."""
        rate = self.scenario.training.rate_at(round_, self.scenario.rounds)
        return TaskInfo(round=round_, rounds=self.scenario.rounds, settled=settled, learning_rate=rate)

    def outcome_at(self, silo: str, outcome: TaskOutcome) -> float:
        """When a task handed out now will have its outcome [s of virtual time]."""
        wait = self.scenario.participation.interrupted == "wait"
        on = self.trace.outcome_at(silo, outcome.handed, outcome.due, wait=wait)
        return on if outcome.sent else outcome.due

    def longest_first(self, actions: Sequence[Action]) -> list[Action]:
        """Actions with the tasks among them in order of their work, on where tasks stood.

        Silos that share a machine's slots train in the order their tasks come; with the longest last a round would end
        in one of them working alone. Nothing else depends on the order.
        """
        work = {
            silo.name: samples * (1 + silo.paired)
            for silo, samples in zip(self.context.silos, self.samples, strict=True)
        }
        tasks = [action for action in actions if isinstance(action, Send)]
        tasks.sort(key=lambda task: -work[task.silo])
        waiting = iter(tasks)
        return [next(waiting) if isinstance(action, Send) else action for action in actions]
