"""A rehearsal: the first rounds of a run in this process, to measure what its tasks, merges and evaluations take.

Nothing is sent, and what is written goes to a temporary folder.
"""

from __future__ import annotations

import math
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil

import protocols
from coordinator.in_process_peers import InProcessPeers, PeerFunction
from coordinator.program import CoordinatorArguments, run_coordinator
from fedmq.config.resolve import ResolvedRun
from fedmq.errors import InputError
from fedmq.federation.population import Population, device_of
from fedmq.federation.protocol import Task
from fedmq.launch.supervisor import inline_peers
from fedmq.runs.status import Status
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.messages import Kind, Message
from fedmq.wire.payloads import Payload, tensor_bytes
from protocols.parts.missing_branch import shortened
from silos.preflight import first_items
from silos.program import Silo, SiloArguments

#: Maximum number of merges of a rehearsal, and the time after which it ends at the next task [s].
_MERGES, _MOST_SECONDS = 3, 15.0


@dataclass(frozen=True)
class Answer:
    """One task or evaluation, as its silo or the evaluator carried it out.

    Args:
        name: name of the silo or the evaluator.
        seconds: time that it took [s].
        down: size of the request's payloads [bytes].
        up: size of the answer's payloads [bytes].
    """

    name: str
    seconds: float
    down: int
    up: int


@dataclass
class Rehearsal:
    """What the first rounds took.

    Args:
        tasks: the tasks in order; each silo's first one is slower, as libraries start up.
        evaluations: the evaluations in order.
        merges: number of merges.
        seconds: time of the rounds with their evaluations [s].
    """

    tasks: list[Answer] = field(default_factory=list)
    evaluations: list[Answer] = field(default_factory=list)
    merges: int = 0
    seconds: float = 0.0

    def of(self, names: Sequence[str]) -> list[Answer]:
        """The tasks of some silos."""
        return [each for each in self.tasks if each.name in names]

    @property
    def evaluation_seconds(self) -> float:
        """Time of an evaluation: the shortest [s]."""
        return min((each.seconds for each in self.evaluations), default=0.0)

    @property
    def merge_seconds(self) -> float:
        """Time of a merge and of the coordinator's other work for a round [s]."""
        others = sum(each.seconds for each in (*self.tasks, *self.evaluations))
        return max(0.0, self.seconds - others) / max(1, self.merges)


def seconds_of(answers: Sequence[Answer]) -> float:
    """Median time of tasks, without the first third, in which libraries start up [s]."""
    later = answers[len(answers) // 3 :]
    return statistics.median(each.seconds for each in later)


def rehearse(run: ResolvedRun, population: Population) -> Rehearsal:
    """Carry out the first rounds of a run, at most three, until a time limit; scripted faults are left out.

    Args:
        run: the run.
        population: its data.

    Raises:
        FedmqError: a task failed, or the run would be refused.
    """
    run = replace(run, scenario=run.scenario.model_copy(update={"faults": (), "clock": "virtual"}))
    found, began = Rehearsal(), time.monotonic()

    def peers(name: Path, same: Population) -> dict[str, PeerFunction]:
        answers = inline_peers(run, RunFolder(name), population.prepared.folder, same)
        return {each: partial(_timed, found, each, answer) for each, answer in answers.items()}

    def note(status: Status) -> None:
        found.merges = status.round
        if status.round:
            found.seconds = time.monotonic() - began

    with tempfile.TemporaryDirectory(prefix="fedmq-check-") as name:
        place = Path(name)
        run_coordinator(
            CoordinatorArguments(run, InProcessPeers.uri, place, place, data=population.prepared.folder),
            status=note,
            stop_wanted=lambda: found.merges >= _MERGES or time.monotonic() - began > _MOST_SECONDS,
            peers=partial(peers, place),
        )
    return found


def _timed(found: Rehearsal, name: str, answer: PeerFunction, message: Message) -> tuple[Payload, ...]:
    began = time.monotonic()
    payloads = answer(message)
    seconds = time.monotonic() - began
    kept = found.tasks if message.header.kind is Kind.TASK else found.evaluations
    kept.append(Answer(name, seconds, size_of(message.payloads), size_of(payloads)))
    return payloads


def size_of(payloads: Sequence[Payload]) -> int:
    """Size of payload tensors [bytes], as the summary counts traffic."""
    return sum(map(tensor_bytes, payloads))


@dataclass(frozen=True)
class Step:
    """One training step of one silo.

    Args:
        seconds: time of a whole task, estimated from the step [s].
        memory: growth of this process's peak memory; 0 if it needed more before [bytes].
        down: size of the task [bytes].
        up: size of the reply [bytes].
    """

    seconds: float
    memory: int
    down: int
    up: int


def measured_step(run: ResolvedRun, population: Population, name: str) -> Step | None:
    """Measure the second of two equal steps of a silo; None if the method never selects it.

    Raises:
        FedmqError: the step failed.
    """
    scenario = run.scenario
    before, most = psutil.Process().memory_info().rss, _peak()
    model = population.build_model(scenario, device_of(scenario.device), ("image", "text"))
    with tempfile.TemporaryDirectory(prefix="fedmq-check-") as folder:
        place = Path(folder)
        arguments = SiloArguments(run, name, InProcessPeers.uri, place, place, data=population.prepared.folder)
        silo = Silo(arguments, population, model, noise=scenario.seed)
        training = silo.context.training
        context = replace(silo.context, training=training.model_copy(update={"local_epochs": 1}))
        protocol = protocols.create(scenario.protocol, context)
        if not protocol.eligible(silo.facts):
            return None
        size = min(training.batch_size, len(silo.dataset))
        if size == 0:
            raise InputError(name, "no training items", "at least one")
        initial = protocol.initial(silo.model.flat.detach().cpu().clone())
        task = Task(1, 0, 0, training.rate_at(0, scenario.schedule_rounds), protocol.task(initial, silo.facts))
        local = replace(silo.local({}), dataset=first_items(silo.dataset, size), unpaired=())
        protocol.train(local, task)
        began = time.monotonic()
        trained = protocol.train(local, task)
        seconds = time.monotonic() - began
    steps = training.local_epochs * math.ceil(len(silo.dataset) / size)
    peak = _peak()
    sent = [shortened(payload, silo.context.layout, silo.facts) for payload in trained.payloads]
    return Step(seconds * steps, peak - before if peak > most else 0, size_of(task.payloads), size_of(sent))


def _peak() -> int:
    """The largest memory of this process so far [bytes]."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
