"""A round of a secure sum between the real classes of silos and coordinator, without messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from coordinator.round_events import Arrived, Collect, Stage
from coordinator.run_context import CostModel, RunContext
from coordinator.secure_sums import Answer, SecureSums
from fedmq.clock import VirtualClock
from fedmq.config.privacy import Privacy
from fedmq.config.sections import Cost
from fedmq.federation.protocol import State, Update
from fedmq.federation.sums import SumLayout, with_bit
from fedmq.storage.run_folder import RunFolder
from fedmq.wire import secure_sum
from fedmq.wire.keys import init_keys, load_accepted, load_identity
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import Header, Kind, Message
from fedmq.wire.payloads import Payload
from protocols.parts.aggregation import shortened
from silos.secure_sums import SecureSums as OfSilo
from tests.small_federation import SmallFederation
from tests.threaded_run import resolved, run_of

#: Five silos: one without images, one without captions.
KINDS = ((True, True), (True, True), (False, True), (True, True), (True, False))
SIZES = (11, 9, 7, 5, 8)
NAMES = tuple(f"silo-{index:02d}" for index in range(len(KINDS)))


@dataclass
class Round:
    """A coordinator and its silos in one round, called by the test instead of the rounds machine."""

    coordinator: SecureSums
    silos: dict[str, OfSilo]
    folder: Path
    context: RunContext
    state: State
    replies: dict[str, tuple[Payload, ...]]  # what each silo would reply without secure sums
    version: int = 2
    updates: dict[str, Update] = field(default_factory=dict)

    @property
    def privacy(self) -> Privacy:
        return self.context.scenario.privacy

    @property
    def layout(self) -> SumLayout:
        return with_bit(self.context.protocol.sum_layout(), self.privacy)

    def answer(self, silo: str, payloads: Sequence[Payload]) -> Payload:
        """What a silo answers in a step."""
        header = Header(
            run="run-0",
            kind=Kind.SUM,
            sender="coordinator",
            receiver=silo,
            sequence=3,
            base_version=self.version,
            sent_at=0.0,
        )
        (payload,) = self.silos[silo].respond(Message(header, tuple(payloads)), self.layout)
        return payload

    def reported(self, *silos: str) -> None:
        """These silos train and report."""
        for silo in self.context.context.silos:
            if silo.name in silos:
                sent = tuple(shortened(each, self.layout.layout, silo) for each in self.replies[silo.name])
                payloads = self.silos[silo.name].withhold(self.version, sent, self.layout, silo, self.privacy)
                self.updates[silo.name] = Update(silo, 3, self.version, 0, 1.0, payloads)
        self.collect(Stage.TRAIN, {name: self.updates[name] for name in silos})

    def step(self, stage: Stage, *silos: str) -> dict[str, Payload]:
        """These silos answer a step."""
        found = {name: self.answer(name, self.coordinator.request(stage, name)) for name in silos}
        self.collect(stage, {name: Answer(3, payload) for name, payload in found.items()})  # type: ignore[arg-type]
        return found

    def collect(self, stage: Stage, answers: Mapping[str, Update | Answer]) -> None:
        replies = tuple(Arrived(name, 3) for name in answers)
        self.coordinator.collect(
            Collect(self.version, stage, replies), answers, {self.version: self.state}, dict.fromkeys(NAMES, 0)
        )

    def merged(self, *silos: str) -> State:
        """The merge of these silos' sum."""
        updates = [self.updates[name] for name in silos]
        return self.coordinator.merge(self.state, updates, self.version).state

    def plain(self, *silos: str) -> State:
        """The merge of these silos' replies without a secure sum."""
        updates = [Update(self.updates[name].silo, 3, self.version, 0, 1.0, self.replies[name]) for name in silos]
        return self.context.protocol.merge(self.state, updates, self.version).state

    def fixed_point_sums(self, *silos: str) -> Mapping[str, np.ndarray]:
        """The plain sums of what these silos keep, weighted and in fixed point, by section."""
        agreed = self.coordinator._sum
        assert agreed is not None
        totals = {place: np.zeros(size, np.uint32) for place, size in enumerate(agreed.sizes)}
        for name in silos:
            kept = self.silos[name]._kept
            assert kept is not None
            for place in agreed.places(name):
                values = kept.values[agreed.weights.branches[place]]
                numbers = np.empty(len(values), np.uint32)
                secure_sum.fixed_point(values, float(agreed.row(name)[place]), agreed.bounds[place], numbers)
                totals[place] += numbers
        names = agreed.weights.branches
        return {names[place]: secure_sum.decoded(total, agreed.bounds[place]) for place, total in totals.items()}


def begin(
    tiny: Path, folder: Path, federation: SmallFederation, replies: dict[str, tuple[Payload, ...]], *settings: str
) -> Round:
    """A round of a federation of :data:`KINDS` in which nothing has happened."""
    scenario = resolved(
        tiny, f"silos.count={len(NAMES)}", "missing_modality.silos={silo-02: text, silo-04: image}", *settings
    )
    cost = CostModel(Cost(), 0, NAMES, 1, 1, 1)
    context = RunContext(scenario, federation.protocol, federation.context, SIZES, cost, RunFolder(folder))
    keys, run = folder / "keys", run_of(scenario)
    init_keys(keys, ("coordinator", "evaluator", *NAMES))
    accepted = load_accepted(keys)
    log = MessageLog(folder / "coordinator.jsonl", "coordinator", VirtualClock())
    silos = {}
    for name in NAMES:
        of_silo = MessageLog(folder / f"{name}.jsonl", name, VirtualClock())
        silos[name] = OfSilo(run, load_identity(keys, name), accepted, keys, folder, of_silo)
    return Round(SecureSums(context, accepted, run.id, log), silos, folder, context, federation.state, replies)
