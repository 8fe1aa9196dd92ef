"""Rounds of ten silos with a 12 MB model through the real loop, roster, channels and checkpoints, without training."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from benchmarks.delta import floor
from benchmarks.line import MEGABYTES, PARAMETERS, coordinator_end, link_of, started, two_branches
from benchmarks.measure import Number, Result, Stopwatch, spread, torch_threads
from coordinator import checkpoints, sessions, updates
from coordinator.counters import Counters
from coordinator.evaluation import EvaluationRequests
from coordinator.faults import FaultInjector
from coordinator.loop import Loop
from coordinator.rounds import Rounds
from coordinator.run_context import CostModel, RunContext
from coordinator.sessions import Roster
from coordinator.status import StatusReport
from fedmq.clock import VirtualClock
from fedmq.config.scenario import Backbone, Data, ProtocolChoice, Scenario
from fedmq.config.sections import Silos
from fedmq.federation.protocol import (
    Context,
    FederatedProtocol,
    Local,
    MergeResult,
    SiloFacts,
    State,
    Task,
    Trained,
    Update,
)
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import Kind
from fedmq.wire.payloads import Delta, Payload
from fedmq.wire.sessions import Session
from protocols.parts import aggregation

_MERGING = "merging"


@dataclass(frozen=True)
class _NoOptions:
    """No options."""


class Constant(FederatedProtocol):
    """FedAvg whose local training returns a constant update."""

    Options: ClassVar[type[Any]] = _NoOptions

    def __init__(self, options: _NoOptions, context: Context) -> None:
        super().__init__(options, context)
        self.branches = aggregation.branch_slices(context.layout)
        self.update = np.full(context.layout.size, 1e-3, np.float32)

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The update."""
        return frozenset({Delta})

    def initial(self, theta: torch.Tensor) -> State:
        """The parameters."""
        return State(theta)

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The model."""
        return (state.model(self.context.layout),)

    def train(self, local: Local, task: Task) -> Trained:
        """Return the constant without training."""
        return Trained((self.reply(),), {}, 0.0)

    def reply(self) -> Delta:
        """The constant update."""
        return Delta(self.context.layout.digest, self.update, n_samples=1)

    def merge(self, state: State, replies: Sequence[Update], round_: int) -> MergeResult:
        """FedAvg's merge."""
        weights = aggregation.sample_weights([update.samples for update in replies])
        return MergeResult(State(aggregation.merge_updates(state.theta, replies, weights, self.branches, True)))


def _run_context(scenario: Scenario, folder: Path) -> RunContext:
    silos = tuple(SiloFacts(name, index, True, True) for index, name in enumerate(scenario.silo_names))
    context = Context(0, scenario.rounds, silos, two_branches(), 512, scenario.training)
    size = context.layout.nbytes
    cost = CostModel(scenario.cost, 0, scenario.silo_names, 1, size, size)
    method = Constant(_NoOptions(), context)
    return RunContext(scenario, method, context, (1,) * len(silos), cost, RunFolder(folder), pairs=(1,) * len(silos))


def _silo(uri: str, folder: Path, name: str, scenario: Scenario) -> None:
    """Answer every task with the constant."""
    torch.set_num_threads(1)
    method = _run_context(scenario, folder).protocol
    assert isinstance(method, Constant)
    link = link_of(uri, folder / "keys", folder / "messages", name)
    link.start()
    try:
        while (message := link.receive()) is not None and message.header.kind is not Kind.STOP:
            header = message.header
            if header.kind is Kind.TASK:
                link.send(
                    Kind.REPLY,
                    (method.reply(),),
                    sequence=header.sequence,
                    reply_to=header.sequence,
                    base_version=header.base_version,
                )
            del message
    finally:
        link.close()


def measure(silos: int, rounds: int) -> tuple[list[float], Stopwatch]:
    """Seconds of each round but the first, from merge to merge, and the seconds of the coordinator's steps."""
    scenario = Scenario(
        name="bench",
        rounds=rounds,
        protocol=ProtocolChoice(name="constant"),
        data=Data(name="openmoji"),
        backbone=Backbone(),
        silos=Silos(count=silos),
    )
    watch = Stopwatch()
    with torch_threads(1), tempfile.TemporaryDirectory(prefix="bench-") as name:
        root = Path(name)
        context = _run_context(scenario, root)
        with coordinator_end(f"shm://{root / 'wire'}", root, scenario.silo_names) as (listener, peers, log):
            loop = _loop(context, peers, log)
            with (
                started(_silo, [(listener.uri, root, silo, scenario) for silo in scenario.silo_names]),
                watch.around(
                    (sessions, "seal_shared", "sealing the model, once for all silos"),
                    (sessions, "seal_message", "sealing tasks"),
                    (type(listener), "send", "passing tasks to ZeroMQ"),
                    (Session, "open", "opening replies"),
                    (sessions, "decode_opened", "decoding replies"),
                    (updates, "check_reply", "checking replies"),
                    (Constant, "merge", _MERGING),
                    (checkpoints, "save", "checkpoint, in total"),
                    (os, "fsync", "of that in fsync"),
                ),
            ):
                loop.run()
    return np.diff(watch.ended[_MERGING]).tolist(), watch


def _loop(context: RunContext, peers: Roster, log: MessageLog) -> Loop:
    """The coordinator's loop, without an evaluator: all versions are marked as evaluated."""
    clock, counters = VirtualClock(), Counters()
    evaluation = EvaluationRequests(context, peers, log, clock, range(context.scenario.rounds + 1))
    return Loop(
        context,
        Rounds(context.plan),
        {0: context.protocol.initial(torch.zeros(PARAMETERS))},
        clock,
        peers,
        log,
        counters,
        FaultInjector(context.script, context.folder, log, clock, order=None, wired=True, issued={}),
        {},
        evaluation,
        StatusReport(context, clock, peers, counters, evaluation, lambda _: None, log.logger),
        stop_wanted=lambda: False,
    )


def run(*, smoke: bool = False) -> Result:
    """Measure the seconds per round and their breakdown in the coordinator.

    ``smoke`` changes nothing: fewer messages would not reach the limits on them.
    """
    del smoke
    silos, rounds = 10, 20
    seconds, watch = measure(silos, rounds)
    # A round lasts from merge to merge: tasks out, replies in, merge, checkpoint. The first round is not measured.
    whole = spread(f"a round of {silos} silos", seconds, "s", "at most 0.18 s")
    with torch_threads(1):
        least = 2 * silos * statistics.median(floor()) / 1e3
    parts = [Number(f"  {part}", spent / rounds, "s per round") for part, spent in watch.seconds.items()]
    known = sum(spent for part, spent in watch.seconds.items() if not part.startswith("of that"))
    rest = Number(
        "  the rest: waiting for replies, message log, machine",
        sum(seconds) / len(seconds) - known / rounds,
        "s per round",
    )
    ratio = Number("a round, as a multiple of the floor", whole.value / least, "x")
    lower = Number(f"floor: the floor of delta, {2 * silos} times in turn", least, "s")
    note = (
        f"{silos} processes, a model of {MEGABYTES:.2f} MB down and an update as large up, {rounds} rounds, shm "
        "(the default of launcher local), a checkpoint with fsync after each"
    )
    return Result("rounds", (whole, ratio, lower, *parts, rest), (note,))
