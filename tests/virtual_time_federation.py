"""A tests.small_federation in virtual time: the round logic drives a method, without messages."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from coordinator.participation import RoundsPlan
from coordinator.round_events import Action, Arrived, Joined, Merge, Merged, Send
from coordinator.rounds import Rounds
from fedmq.config.sections import Staleness
from fedmq.federation.protocol import Local, SiloFacts, State, Task, Update
from fedmq.federation.updates import damping, mixed
from protocols.parts.aggregation import ordered
from tests.small_federation import SmallFederation

#: Virtual seconds of each silo's task; the third is a straggler.
DURATIONS = (1.0, 1.1, 9.0, 1.3)


@dataclass
class Federation:
    """A method run to its end; ``staleness`` of every reply merged, and the virtual time of the last merge."""

    population: SmallFederation
    plan: RoundsPlan
    mixing: float = 1.0
    states: dict[int, State] = field(default_factory=dict)
    staleness: list[int] = field(default_factory=list)
    merges: list[int] = field(default_factory=list)
    now: float = 0.0

    def run(self) -> State:
        self.rounds = Rounds(self.plan)
        self.due: list[tuple[float, int, int, Update]] = []
        self.replies: dict[tuple[str, int], Update] = {}
        self.states[0] = self.population.state
        for silo in self.plan.silos:
            self._handle(Joined(silo))
        while self.rounds.version < self.plan.rounds:
            self.now, _, _, reply = heapq.heappop(self.due)
            self.replies[reply.silo.name, reply.sequence] = reply
            self._handle(Arrived(reply.silo.name, reply.sequence))
        return self.states[self.plan.rounds]

    def _handle(self, event: Arrived | Joined | Merged) -> None:
        self.rounds, actions = self.rounds.handle(event)
        for action in actions:
            self._perform(action)

    def _perform(self, action: Action) -> None:
        if isinstance(action, Send):
            silo = next(each for each in self.population.context.silos if each.name == action.silo)
            reply = Update(silo, action.sequence, action.base_version, 0, 1.0, self._train(silo, action))
            heapq.heappush(self.due, (self.now + DURATIONS[silo.index], silo.index, action.sequence, reply))
        elif isinstance(action, Merge):
            replies = ordered([self._aged(self.replies[each.silo, each.sequence]) for each in action.replies])
            before, version = self.states[self.rounds.version], self.rounds.version
            after = self.population.protocol.merge(before, replies, version).state
            if self.plan.mode == "async":
                rate = self.mixing * replies[0].damping
                after = replace(after, theta=mixed(before.theta, after.theta, rate))
                if rate < 1.0:
                    after = self.population.protocol.mix_state(before, after, rate)
            self.states[version + 1] = after
            self.staleness += [reply.staleness for reply in replies]
            self.merges.append(len(replies))
            self._handle(Merged(version + 1))

    def _aged(self, reply: Update) -> Update:
        age = self.rounds.version - reply.base_version
        return replace(reply, staleness=age, damping=damping(Staleness(), age))

    def _train(self, silo: SiloFacts, send: Send) -> tuple[object, ...]:
        population = self.population
        payloads = population.protocol.task(self.states[send.base_version], silo)
        task = Task(send.sequence, send.base_version, send.round, 1e-3, payloads)
        local = Local(silo, population.shares[silo.index], population.model, population.personal.get(silo.index, {}))
        trained = population.protocol.train(local, task)
        population.personal[silo.index] = trained.state
        return trained.payloads


def federation(
    population: SmallFederation, rounds: int, settings: Mapping[str, object], mixing: float = 1.0
) -> Federation:
    silos = tuple(silo.name for silo in population.context.silos)
    eligible = tuple(silo.name for silo in population.eligible)
    return Federation(population, replace(RoundsPlan(0, rounds, silos, eligible), **settings), mixing)  # type: ignore[arg-type]
