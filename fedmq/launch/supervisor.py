"""``fedmq scenario``: starts and supervises a coordinator, an evaluator and all silos on this machine.

These are the programs of ``fedmq coordinator``, ``fedmq evaluator`` and ``fedmq silo``. They are forked from a
forkserver that has imported everything, so that they share its memory pages.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import torch

from coordinator.faults import ProcessCommand
from coordinator.peers import InProcessPeers, PeerFunction, PeerFunctions
from coordinator.program import CoordinatorArguments, CoordinatorResult, run_coordinator
from fedmq.config.resolve import ResolvedRun
from fedmq.config.scenario import Scenario
from fedmq.config.site import Site
from fedmq.errors import RunError
from fedmq.evaluation.program import Evaluator
from fedmq.federation.population import Population, device_of
from fedmq.launch.forkserver import private_folder, warm_up
from fedmq.launch.interrupts import until_stopped
from fedmq.launch.processes import Limits, ProcessGroup, allow_descriptors, limits_here, plan_hosting, raise_reported
from fedmq.launch.remote_peer import Cluster, refuse_local_only
from fedmq.models.two_tower import TwoTower
from fedmq.profiling import RECORDER, party, span
from fedmq.runs.run_records import RunSummary
from fedmq.runs.status import Status
from fedmq.storage.logs import LogOptions
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.keys import init_keys
from fedmq.wire.messages import COORDINATOR, EVALUATOR, Message
from fedmq.wire.payloads import Payload
from silos.personal_state import DiskQueue
from silos.tasks import Silo, SiloArguments

#: Interval between measurements of memory, which take about a second for thirty silos [s].
_MEMORY_SECONDS = 30.0
#: Minimum time between two checkpoints of a run in one process [s].
_CHECKPOINT_SECONDS = 30.0


@contextlib.contextmanager
def _signals(folder: RunFolder) -> Iterator[Callable[[], bool]]:
    """Whether SIGINT or SIGTERM was received in the block; a second one raises KeyboardInterrupt."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield until_stopped(lambda: f"--resume {shlex.quote(str(folder.root))}")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Simulated:
    """Result of a simulated run."""

    outcome: CoordinatorResult
    seconds: float  # time from the call to the end [s]
    ready_seconds: float | None  # time from the call until all silos had joined [s]; None if they did not
    peak_pss_mb: float  # peak memory of all processes together [MiB]


@contextlib.contextmanager
def _cluster_of(scenario: Scenario, folder: RunFolder) -> Iterator[Cluster | None]:
    """The cluster that the scenario's launcher selects; None for this machine."""
    refuse_local_only(scenario)
    match scenario.launcher:
        case "ray":
            from fedmq.launch.ray_cluster import RayCluster  # noqa: PLC0415 - an extra

            with RayCluster.connected(scenario, folder) as ray:
                yield ray
        case "slurm":
            from fedmq.launch.slurm_cluster import SlurmCluster  # noqa: PLC0415 - an extra

            with SlurmCluster.connected(scenario, folder) as slurm:
                yield slurm
        case _:
            yield None


def simulate(
    run: ResolvedRun,
    folder: RunFolder,
    *,
    resume: bool,
    status: Callable[[Status], None],
    began: float | None = None,
    data: Path | None = None,
    notice: Callable[[str], None] = lambda _: None,
    logs: LogOptions | None = None,
    sites: Mapping[str, Site] | None = None,
) -> Simulated:
    """Run a scenario with real processes, on this machine or on those of a cluster; without a report.

    Args:
        run: the run; its data have been prepared.
        folder: the run folder.
        resume: resume from its last checkpoint.
        status: called with the run's status a few times per second.
        began: value of ``time.monotonic()`` at the command's start, for the start-up time.
        data: folder of the prepared data, from :func:`prepare_population`; None lets every process find it.
        notice: called with one line if silos share processes because this machine is too small.
        logs: settings of the log for operators; None for no log.
        sites: the sites by name, if they have their own data; None for a simulated partition.

    Raises:
        RunError: the run cannot continue.
        InputError: the coordinator refused its input.
    """
    began = time.monotonic() if began is None else began
    allow_descriptors()
    alone = run.scenario.launcher in ("ray", "slurm") or sites
    # The limits of this machine do not apply to a cluster: silos share processes there only with silos.hosts. A
    # process of several silos has one data set, so it cannot serve sites with their own data.
    hosting = plan_hosting(run.scenario, Limits(math.inf, math.inf) if alone else limits_here())
    if hosting.reason:
        notice(hosting.reason)
    warm_up(run.scenario.backbone.name)
    with private_folder() as private, _cluster_of(run.scenario, folder) as cluster:
        keys = private / "keys"
        init_keys(keys, (COORDINATOR, EVALUATOR, *run.scenario.silo_names))
        supervisor = ProcessGroup(run, folder, keys, resume, data, hosting, logs, cluster, sites=sites or {})
        try:
            with _signals(folder) as stop_wanted:
                outcome, ready = _watch(supervisor, status, stop_wanted, began)
        except BaseException:
            # A second Ctrl-C or an error: the processes were not asked to stop, so do not wait for them.
            supervisor.patience = 0.0
            raise
        finally:
            supervisor.end()
    return Simulated(outcome, time.monotonic() - began, ready, supervisor.peak_pss / 2**20)


@span("data")
def inline_peers(run: ResolvedRun, folder: RunFolder, data: Path | None, population: Population) -> PeerFunctions:
    """The evaluator and every silo of a run as functions; on CPU cores, as many at a time as the scenario has slots.

    Each thread computes as a silo's process does, with one torch thread. Silos share the models, one for each thread,
    in turn. A silo's data are loaded with its first message.
    """
    scenario = run.scenario
    device = device_of(scenario.device)
    threads = 1 if RECORDER.on else inline_threads(scenario, device)  # a profile has one party at work at a time
    models: queue.SimpleQueue[TwoTower] = queue.SimpleQueue()
    for _ in range(threads):
        models.put(population.build_model(scenario, device, ("image", "text"), initial=False))
    evaluator, disk_queue = Evaluator(scenario, population, device), DiskQueue()
    answers: dict[str, PeerFunction] = {EVALUATOR: lambda message: (evaluator.evaluate(message.payloads),)}

    silos: dict[str, Silo] = {}

    def respond(name: str, message: Message) -> tuple[Payload, ...]:
        model = models.get()
        try:
            if name not in silos:
                arguments = SiloArguments(run, name, InProcessPeers.uri, folder.root, folder.root, data=data)
                silos[name] = Silo(arguments, population, model, noise=scenario.seed, disk_queue=disk_queue)
            silos[name].lend(model)
            return silos[name].respond(message)
        finally:
            models.put(model)

    def committed(tasks: Mapping[str, int]) -> None:
        for name, silo in silos.items():
            silo.store.drop_unwritten(tasks.get(name, 0))

    answers |= {name: partial(respond, name) for name in scenario.silo_names}
    pool = ThreadPoolExecutor(threads, "silos", torch.set_num_threads, (1,)) if threads > 1 else None
    return PeerFunctions(answers, committed, disk_queue.settle, pool)


def inline_threads(scenario: Scenario, device: str) -> int:
    """Number of silos that compute at a time in a run with ``launcher: inline``; a GPU serves one after the other."""
    return min(scenario.slots, len(os.sched_getaffinity(0))) if device == "cpu" else 1


def simulate_inline(
    run: ResolvedRun,
    folder: RunFolder,
    *,
    resume: bool,
    status: Callable[[Status], None],
    data: Path | None = None,
    logs: LogOptions | None = None,
) -> Simulated:
    """Run a scenario in this process: silos and evaluator are function calls, without messages.

    The model is bit-identical to that of real processes, in about half the processor time, but there are no messages to
    audit. A run that is killed loses up to half a minute of work, as it does not write a checkpoint after each merge.
    Arguments and errors as in :func:`simulate`.
    """
    began, scenario = time.monotonic(), run.scenario
    # Work that is repeated after a crash has the same result, unless it depends on the wall clock or a scripted fault.
    seconds = 0.0 if scenario.faults or scenario.clock == "wall" else _CHECKPOINT_SECONDS
    arguments = CoordinatorArguments(
        run, InProcessPeers.uri, folder.root, folder.root, resume, data, logs=logs, checkpoint_seconds=seconds
    )
    with _signals(folder) as stop_wanted, party(COORDINATOR):
        outcome = run_coordinator(
            arguments, status=status, stop_wanted=stop_wanted, peers=partial(inline_peers, run, folder, data)
        )
    memory = psutil.Process().memory_full_info().pss / 2**20
    return Simulated(outcome, time.monotonic() - began, None, memory)


def _watch(
    supervisor: ProcessGroup, status: Callable[[Status], None], stop_wanted: Callable[[], bool], began: float
) -> tuple[CoordinatorResult, float | None]:
    """Start all processes and wait for the coordinator's result."""
    line = supervisor.start_coordinator()
    stop_sent, measured_at, ready = False, time.monotonic(), None
    while True:
        if stop_wanted() and not stop_sent:
            stop_sent = True
            supervisor.stopping = time.monotonic()
            with contextlib.suppress(OSError):
                line.send("stop")
        item = _next(line, supervisor)
        match item:
            case None:
                pass
            case str(uri):
                supervisor.start_peers(uri)
            case ProcessCommand():
                line, stop_sent = supervisor.execute(item, line), stop_sent and item.what != "die"
            case Status():
                if ready is None and item.online == len(supervisor.run.scenario.silo_names):
                    ready = time.monotonic() - began
                    supervisor.measure_memory()
                status(item)
            case CoordinatorResult():
                supervisor.measure_memory()
                return item, ready
            case _:
                raise_reported(item)
        supervisor.thaw()
        supervisor.report_slow_stop()
        if not stop_sent:
            supervisor.revive()
        if time.monotonic() - measured_at > _MEMORY_SECONDS:
            supervisor.measure_memory()
            measured_at = time.monotonic()


@span("wait")
def _next(line: Connection, supervisor: ProcessGroup) -> Any:
    """The coordinator's next report, or None after a while; raises RunError if the coordinator died."""
    sentinel = supervisor.coordinator.sentinel
    ready = wait([line, sentinel], timeout=0.1 if supervisor.frozen else 0.5)
    if line in ready:
        with contextlib.suppress(EOFError, ConnectionResetError):
            return line.recv()
    if ready:
        supervisor.coordinator.join(1.0)
        code = supervisor.coordinator.exitcode
        folder = supervisor.folder
        command = f"fedmq scenario --resume {shlex.quote(str(folder.root))}"
        raise RunError(f"the coordinator died with exit code {code}; continue with {command}")
    return None


def finish_summary(summary: RunSummary, simulated: Simulated) -> RunSummary:
    """The summary with the times and memory that only the parent of all processes can measure."""
    seconds = {
        # A resumed run counts the total time of its coordinators, any other run that of the command.
        "total": round(max(simulated.seconds, summary.seconds.total), 3),
        "startup": round(simulated.ready_seconds or summary.seconds.startup, 3),
    }
    update = {
        "seconds": summary.seconds.model_copy(update=seconds),
        "processes": summary.processes.model_copy(update={"peak_pss_mb": round(simulated.peak_pss_mb, 1)}),
    }
    return summary.model_copy(update=update)
