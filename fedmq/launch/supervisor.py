"""``fedmq scenario``: starts and supervises a coordinator, an evaluator and all silos on this machine.

These are the programs of ``fedmq coordinator``, ``fedmq evaluator`` and ``fedmq silo``. They are forked from a
forkserver that has imported everything, so that they share its memory pages.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil

from coordinator.fault_injection import ProcessCommand
from coordinator.in_process_peers import InProcessPeers, PeerFunction
from coordinator.program import CoordinatorArguments, CoordinatorResult, run_coordinator
from fedmq.config.resolve import ResolvedRun
from fedmq.errors import InputError, RunError
from fedmq.evaluation.program import Evaluator, EvaluatorArguments
from fedmq.federation.population import Population, device_of
from fedmq.launch import processes as children
from fedmq.launch.forkserver import CONTEXT, warm_up
from fedmq.launch.hosting import Hosting, allow_descriptors, limits_here, plan_hosting
from fedmq.launch.interrupts import say_stopping
from fedmq.launch.private_folder import private_folder
from fedmq.runs.run_records import RunSummary
from fedmq.runs.status import Status
from fedmq.storage.logs import LogOptions
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.keys import init_keys
from fedmq.wire.messages import COORDINATOR, EVALUATOR
from fedmq.wire.transports.shared import SHARED
from silos.host import HostArguments
from silos.program import Silo, SiloArguments

#: Most restarts of a process that dies; after one more death the run fails.
_MAX_RESTARTS = 3
#: Interval between measurements of memory, which take about a second for thirty silos [s].
_MEMORY_SECONDS = 30.0
#: Time for the processes to end by themselves before they are killed [s].
_STOP_PATIENCE = 20.0
#: Time before an evaluator without a result receives SIGTERM [s].
_EVALUATOR_GRACE = 1.0
#: Names of the host processes, with a number.
_HOST = "host-"
#: Time after which the user is told that the processes are still stopping [s].
_SLOW_STOP_SECONDS = 2.0


def prepare_population(run: ResolvedRun, progress: Callable[[str, int, int], None] | None) -> Path:
    """Prepare the run's data in a separate process, as the encoders are needed only for extracting features.

    Args:
        run: the run.
        progress: called with (what, done, total) during long steps.

    Returns:
        The folder of the prepared data.

    Raises:
        InputError: the data cannot be read, or not partitioned as configured.
        RunError: the process died.
    """
    line, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=children.population_process, args=(run, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        while True:
            match line.recv():
                case (str(what), int(done), int(total)):
                    if progress is not None:
                        progress(what, done, total)
                case ("input", str(place), str(found), str(allowed)):
                    raise InputError(place, found, allowed)
                case (str(text),):
                    raise RunError(text)
                case Path() as folder:
                    return folder
    except EOFError:
        process.join(1.0)
        raise RunError(f"preparing the data ended with exit code {process.exitcode}, see above") from None
    finally:
        if process.is_alive():
            process.join(1.0)
            process.kill()
        process.join()


def _host_name(index: int) -> str:
    return f"{_HOST}{index}"


@dataclass
class _Supervisor:
    """The processes of one run.

    Args:
        run: the run.
        folder: the run folder.
        keys: private folder with keys created for this run.
        resume: resume from the last checkpoint.
        data: folder of the prepared data; None lets every process find it.
        hosting: which silos share a process.
        logs: of the log for operators; None for none.

    Attributes:
        stopped: hosted silos that a fault of the scenario keeps away.
    """

    run: ResolvedRun
    folder: RunFolder
    keys: Path
    resume: bool
    data: Path | None
    hosting: Hosting
    logs: LogOptions | None = None
    stopped: set[str] = field(default_factory=set)
    processes: dict[str, ForkServerProcess] = field(default_factory=dict)
    deaths: dict[str, int] = field(default_factory=dict)
    frozen: dict[str, float] = field(default_factory=dict)
    peak_pss: int = 0
    uri: str = ""
    patience: float = _STOP_PATIENCE
    stopping: float | None = None

    def start_coordinator(self) -> Connection:
        """Start the coordinator; returns the connection on which it reports."""
        ours, theirs = CONTEXT.Pipe()
        bind = f"{SHARED if self.hosting.hosts else ''}ipc://{self.keys.parent / 'wire'}"
        root, most = self.folder.root, self.hosting.most
        arguments = CoordinatorArguments(self.run, bind, self.keys, root, self.resume, self.data, most, True, self.logs)
        self._start(COORDINATOR, children.coordinator_process, arguments, theirs)
        theirs.close()
        return ours

    def start_peers(self, uri: str) -> None:
        """Start the evaluator and every silo or host that is not running yet."""
        self.uri = uri
        silos = [_host_name(index) for index in range(len(self.hosting.hosts))] or self.run.scenario.silo_names
        for name in (EVALUATOR, *silos):
            if name not in self.processes:
                self.start_peer(name)

    def start_peer(self, name: str) -> None:
        """Start or restart a silo, a host or the evaluator."""
        root = self.folder.root
        if name == EVALUATOR:
            evaluator = EvaluatorArguments(self.run, self.uri, self.keys, root, data=self.data, logs=self.logs)
            self._start(name, children.evaluator_process, evaluator)
        elif self.hosting.hosts:
            index = int(name.removeprefix(_HOST))
            names = tuple(silo for silo in self.hosting.hosts[index] if silo not in self.stopped)
            if names:
                first = SiloArguments(self.run, names[0], self.uri, self.keys, root, data=self.data, logs=self.logs)
                self._start(name, children.host_process, HostArguments(names, first, self.hosting.most, index))
        else:
            silo = SiloArguments(self.run, name, self.uri, self.keys, root, data=self.data, logs=self.logs)
            self._start(name, children.silo_process, silo)

    def _process_of(self, name: str) -> str:
        """The process of a silo: its host, or itself."""
        hosts = enumerate(self.hosting.hosts)
        return next((_host_name(index) for index, names in hosts if name in names), name)

    def execute(self, order: ProcessCommand) -> Connection | None:
        """Execute an order of a scripted fault; such deaths do not count towards the limit of restarts.

        Returns:
            The connection to the coordinator if it was restarted.
        """
        name = self._process_of(order.name)
        process = self.processes.get(name)
        match order.what:
            case "die":
                return self.restart_coordinator()
            case "freeze" if process is not None and process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGSTOP)
                self.frozen[name] = time.monotonic() + order.seconds
            case "kill" if process is not None:
                self._restart(name)
            case "stop" | "start" if name != order.name:
                # The host goes on without the silo, or with it again.
                (self.stopped.add if order.what == "stop" else self.stopped.discard)(order.name)
                self._restart(name)
            case "stop" if process is not None:
                self._kill(name)
            case "start" if process is None:
                self.start_peer(name)
            case _:
                pass
        return None

    def _restart(self, name: str) -> None:
        self._kill(name)
        self.start_peer(name)

    def _kill(self, name: str) -> None:
        process = self.processes.pop(name, None)
        if process is not None:
            self.frozen.pop(name, None)  # SIGKILL also ends a paused process
            process.kill()
            process.join()

    def thaw(self, *names: str) -> None:
        """Continue paused processes: those named, and those whose pause is over."""
        now = time.monotonic()
        for name, until in list(self.frozen.items()):
            if name in names or now >= until:
                del self.frozen[name]
                process = self.processes.get(name)
                if process is not None and process.pid is not None and process.is_alive():
                    os.kill(process.pid, signal.SIGCONT)

    def restart_coordinator(self) -> Connection:
        """Restart the coordinator from its checkpoint; silos that had left rejoin, as it waits for all silos."""
        self.processes[COORDINATOR].join()
        self.resume = True
        return self.start_coordinator()

    def _start(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        process = CONTEXT.Process(target=target, args=arguments, name=name, daemon=True)
        process.start()
        self.processes[name] = process

    def revive(self) -> None:
        """Restart processes that died, but not those that exited successfully.

        Raises:
            RunError: a process keeps dying, or refused its input and printed the reason on standard error.
        """
        for name, process in list(self.processes.items()):
            if name == COORDINATOR or process.exitcode is None or process.exitcode == 0:
                continue
            if process.exitcode == 2:
                raise RunError(f"{name} refused its input, see the line above")
            self.deaths[name] = self.deaths.get(name, 0) + 1
            if self.deaths[name] > _MAX_RESTARTS:
                raise RunError(f"{name} died {self.deaths[name]} times, last with exit code {process.exitcode}")
            self.start_peer(name)

    def measure_memory(self) -> None:
        """Update the peak memory of all processes together [bytes, PSS]."""
        with contextlib.suppress(psutil.Error):
            family = [psutil.Process(), *psutil.Process().children(recursive=True)]
            total = 0
            for process in family:
                with contextlib.suppress(psutil.Error):
                    total += process.memory_full_info().pss
            self.peak_pss = max(self.peak_pss, total)

    def report_slow_stop(self) -> None:
        """Print once that the run is still stopping, if that takes long."""
        if self.stopping is not None and time.monotonic() - self.stopping > _SLOW_STOP_SECONDS:
            self.stopping = None
            print("stopping: waiting for the processes to end", file=sys.stderr, flush=True)

    def end(self) -> None:
        """End all processes that this supervisor started and that are still running."""
        self.thaw(*self.frozen)
        peers = [process for name, process in self.processes.items() if name != COORDINATOR]
        try:
            for process in peers:
                # Processes that have joined ignore SIGTERM, as the coordinator stops them; it cannot stop the others.
                if process.name != EVALUATOR:
                    process.terminate()
            began = time.monotonic()
            while (spent := time.monotonic() - began) < self.patience:
                running = [process for process in peers if process.is_alive()]
                if not running:
                    break
                for process in running:
                    # An evaluator that has joined but has no result yet needs a moment to end by itself.
                    if process.name == EVALUATOR and spent > _EVALUATOR_GRACE:
                        process.terminate()
                wait([process.sentinel for process in running], 0.5)
                self.report_slow_stop()
            if COORDINATOR in self.processes:
                self.processes[COORDINATOR].join(0.1)
        finally:
            for process in self.processes.values():
                if process.is_alive():
                    process.kill()
                    process.join()


@contextlib.contextmanager
def _signals(folder: RunFolder) -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM; a second one raises KeyboardInterrupt."""
    caught: list[int] = []

    def note(number: int, _frame: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)
        say_stopping(f"--resume {folder.root}")

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Simulated:
    """Result of a simulated run.

    Args:
        outcome: the coordinator's result.
        seconds: time from the call to the end [s].
        ready_seconds: time from the call until all silos had joined [s]; None if they did not.
        peak_pss_mb: peak memory of all processes together [MiB].
    """

    outcome: CoordinatorResult
    seconds: float
    ready_seconds: float | None
    peak_pss_mb: float


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
) -> Simulated:
    """Run a scenario with real processes on this machine.

    Args:
        run: the run; its data have been prepared.
        folder: the run folder.
        resume: resume from its last checkpoint.
        status: called with the run's status a few times per second.
        began: ``time.monotonic()`` at the command's start, for the start-up time.
        data: folder of the prepared data, from :func:`prepare_population`; None lets every process find it.
        notice: called with one line if silos share processes because this machine is too small.
        logs: of the log for operators; None for none.

    Raises:
        RunError: the run cannot continue.
        InputError: the coordinator refused its input.
    """
    began = time.monotonic() if began is None else began
    allow_descriptors()
    hosting = plan_hosting(run.scenario, limits_here())
    if hosting.reason:
        notice(hosting.reason)
    warm_up(run.scenario.backbone.name)
    with private_folder() as private:
        keys = private / "keys"
        init_keys(keys, (COORDINATOR, EVALUATOR, *run.scenario.silo_names))
        supervisor = _Supervisor(run, folder, keys, resume, data, hosting, logs)
        try:
            with _signals(folder) as caught:
                outcome, ready = _watch(supervisor, status, caught, began)
        except BaseException:
            # A second Ctrl-C or an error: the processes were not asked to stop, so do not wait for them.
            supervisor.patience = 0.0
            raise
        finally:
            supervisor.end()
    return Simulated(outcome, time.monotonic() - began, ready, supervisor.peak_pss / 2**20)


def inline_peers(
    run: ResolvedRun, folder: RunFolder, data: Path | None, population: Population
) -> dict[str, PeerFunction]:
    """The evaluator and every silo of a run as functions, by name; they share one model in turn."""
    scenario = run.scenario
    device = device_of(scenario.device)
    model = population.build_model(scenario, device, ("image", "text"))
    evaluator = Evaluator(scenario, population, device)
    answers: dict[str, PeerFunction] = {EVALUATOR: lambda message: (evaluator.evaluate(message.payloads),)}
    for name in scenario.silo_names:
        arguments = SiloArguments(run, name, InProcessPeers.uri, folder.root, folder.root, data=data)
        answers[name] = Silo(arguments, population, model, noise=scenario.seed).respond
    return answers


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
    audit. Arguments and errors as in :func:`simulate`.
    """
    began = time.monotonic()

    with _signals(folder) as caught:
        outcome = run_coordinator(
            CoordinatorArguments(run, InProcessPeers.uri, folder.root, folder.root, resume, data, logs=logs),
            status=status,
            stop_wanted=lambda: bool(caught),
            peers=partial(inline_peers, run, folder, data),
        )
    memory = psutil.Process().memory_full_info().pss / 2**20
    return Simulated(outcome, time.monotonic() - began, None, memory)


def _watch(
    supervisor: _Supervisor, status: Callable[[Status], None], caught: list[int], began: float
) -> tuple[CoordinatorResult, float | None]:
    """Start all processes and wait for the coordinator's result."""
    line = supervisor.start_coordinator()
    stop_sent, measured_at, ready = False, time.monotonic(), None
    while True:
        if caught and not stop_sent:
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
                line = supervisor.execute(item) or line
                stop_sent = stop_sent and item.what != "die"
            case Status():
                if ready is None and item.online == supervisor.run.scenario.silos.count:
                    ready = time.monotonic() - began
                    supervisor.measure_memory()
                status(item)
            case CoordinatorResult():
                supervisor.measure_memory()
                return item, ready
            case (str(place), str(found), str(allowed)):
                raise InputError(place, found, allowed)
            case (str(text),):
                raise RunError(text)
        supervisor.thaw()
        supervisor.report_slow_stop()
        if not stop_sent:
            supervisor.revive()
        if time.monotonic() - measured_at > _MEMORY_SECONDS:
            supervisor.measure_memory()
            measured_at = time.monotonic()


def _next(line: Connection, supervisor: _Supervisor) -> Any:
    """The coordinator's next report, or None after a while.

    Raises:
        RunError: the coordinator died.
    """
    sentinel = supervisor.processes[COORDINATOR].sentinel
    ready = wait([line, sentinel], timeout=0.1 if supervisor.frozen else 0.5)
    if line in ready:
        with contextlib.suppress(EOFError, ConnectionResetError):
            return line.recv()
    if ready:
        supervisor.processes[COORDINATOR].join(1.0)
        code = supervisor.processes[COORDINATOR].exitcode
        folder = supervisor.folder
        command = f"fedmq scenario --resume {folder.root}"
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
