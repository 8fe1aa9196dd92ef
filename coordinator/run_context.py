"""Fixed facts of a run, derived once from the scenario and its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from coordinator.cost import CostModel
from coordinator.events import Action, Send
from coordinator.participation import Trace, sampling_of
from coordinator.rounds import RoundsPlan
from fedmq.config.scenario import Scenario
from fedmq.federation.faults import FaultSchedule, TaskOutcome
from fedmq.federation.protocol import Context, FederatedProtocol, SiloFacts, Traits
from fedmq.runs.run_records import EvaluatedItems
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.messages import TaskInfo


@dataclass(frozen=True)
class RunContext:
    """Fixed facts of a run, as the coordinator's loop uses them.

    Args:
        scenario: the resolved scenario.
        protocol: the method's coordinator side.
        context: facts shared by the method's coordinator and silo sides.
        samples: training samples of each silo, in silo order: they bound what a reply may claim, weight the sampling
            by size, and determine a task's duration in virtual time and its place in the order of tasks.
        cost: cost model of tasks in virtual time.
        folder: the run folder.
        trace: availability of the silos.
        data: digest of the prepared data.
        trace_file: digest of the file of ``trace``; empty if there is none.
        pairs: items of the evaluated split with both modalities, of each silo.
        evaluated: items of the evaluated split; None if only the evaluator knows them.
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
    pairs: tuple[int, ...] = ()
    evaluated: EvaluatedItems | None = None

    @cached_property
    def script(self) -> FaultSchedule:
        """The scenario's faults."""
        return FaultSchedule(self.scenario.faults, self.scenario.seed, self.context.silos)

    @cached_property
    def _silos(self) -> dict[str, SiloFacts]:
        return {silo.name: silo for silo in self.context.silos}

    def facts_at(self, name: str, version: int) -> SiloFacts:
        """Facts of a silo at a version; they change only by faults, e.g. a lost modality."""
        return self.script.facts(self._silos[name], version)

    @cached_property
    def plan(self) -> RoundsPlan:
        """The part of the scenario that the rounds machine needs."""
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
            minimum=participation.minimum,
        )

    @cached_property
    def traits(self) -> Traits:
        """The method's declared traits."""
        return self.protocol.traits()

    @property
    def gives_up(self) -> bool:
        """Whether a silo that stays away is given up; by default only on a wall clock."""
        chosen = self.scenario.aggregation.on_lost
        return self.scenario.clock == "wall" if chosen is None else chosen == "give_up"

    def task_info(self, round_: int, settled: int) -> TaskInfo:
        """The description that a task carries.

        Args:
            round_: number of the round.
            settled: number of the silo's last durably settled task; it may delete older personal states.
        """
        rate = self.scenario.training.rate_at(round_, self.scenario.schedule_rounds)
        return TaskInfo(round=round_, rounds=self.scenario.rounds, settled=settled, learning_rate=rate)

    def outcome_at(self, silo: str, outcome: TaskOutcome) -> float:
        """Virtual time at which a task's outcome is known, considering the silo's availability [s]."""
        wait = self.scenario.participation.interrupted == "wait"
        on = self.trace.outcome_at(silo, outcome.issued_at, outcome.due, wait=wait)
        return on if outcome.sent else outcome.due

    def longest_first(self, actions: Sequence[Action]) -> list[Action]:
        """Reorder the tasks among the actions by decreasing work; other actions keep their places.

        Silos that share a machine train in the order in which tasks arrive; with the longest task last, a round would
        end with one silo training alone. The order affects nothing else.
        """
        work = {
            silo.name: samples * (1 + silo.paired)
            for silo, samples in zip(self.context.silos, self.samples, strict=True)
        }
        tasks = [action for action in actions if isinstance(action, Send)]
        tasks.sort(key=lambda task: -work[task.silo])
        waiting = iter(tasks)
        return [next(waiting) if isinstance(action, Send) else action for action in actions]
