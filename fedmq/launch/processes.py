"""The processes that ``fedmq scenario`` forks: which silos share one, their main functions, and their group.

They are started, restarted when they die, and ended together; none of them outlives the command.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil

from coordinator.faults import ProcessCommand
from coordinator.program import OTHER_DESCRIPTORS, CoordinatorArguments, run_coordinator
from fedmq.config.resolve import ResolvedRun
from fedmq.config.scenario import Scenario
from fedmq.config.site import Site
from fedmq.errors import FedmqError, InputError, RunError
from fedmq.evaluation.program import EvaluatorArguments, run_evaluator
from fedmq.launch.forkserver import CONTEXT, end_with_forkserver
from fedmq.launch.remote_peer import Cluster, PeerArguments, RemoteProcess
from fedmq.profiling import child
from fedmq.storage.logs import LogOptions
from fedmq.storage.run_folder import RunFolder
from fedmq.text import print_line, size_text
from fedmq.wire.messages import COORDINATOR, EVALUATOR
from fedmq.wire.transports.shared_connections import MAX_BRANCHES, SHARED
from silos.host import HostArguments, run_host
from silos.program import run_silo
from silos.tasks import SiloArguments

#: Memory that a silo's process takes, and the other processes of a run [bytes]. Measured: 35 to 55 MB on features.
_SILO_MEMORY, _OTHER_MEMORY = 60 << 20, 1 << 30
#: File descriptors that the command keeps per process it started.
_DESCRIPTORS = 2
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Limits:
    """What this machine grants the processes of a run."""

    memory: float  # available memory [bytes]
    descriptors: float  # maximum number of open files of a process


def limits_here() -> Limits:
    """The limits of this machine and of the control group that this process is in."""
    memory = float(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):  # ValueError: "max", no limit
        used = int((_CGROUP / "memory.current").read_text())
        memory = min(memory, float(int((_CGROUP / "memory.max").read_text()) - used))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Limits(memory, float("inf") if most == resource.RLIM_INFINITY else float(most))


def allow_descriptors() -> None:
    """Raise this process's limit of open files to the most that it may have; its children inherit it."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@dataclass(frozen=True)
class Hosting:
    """Assignment of silos to processes."""

    hosts: tuple[tuple[str, ...], ...] = ()  # the silos of each host; empty if each silo is a separate process
    # Why they share processes, as a line for the user; empty if the scenario asks for it, or they do not.
    reason: str = ""

    @property
    def most(self) -> int:
        """Number of silos of the largest host; 1 without hosts."""
        return max((len(names) for names in self.hosts), default=1)


def plan_hosting(scenario: Scenario, limits: Limits) -> Hosting:
    """Decide which silos of a run share a process on this machine.

    Raises:
        InputError: so few files may be open that the run cannot start.
    """
    names = scenario.silo_names
    # A host keeps two files of each silo open: its message log, and the log for operators if there is one.
    room = int(min((limits.descriptors - OTHER_DESCRIPTORS) / 2, MAX_BRANCHES))
    if room < 1:
        allowed = f"at least {OTHER_DESCRIPTORS + 16} open files per process: raise the limit with `ulimit -n`"
        raise InputError("open files", int(limits.descriptors), allowed)
    if scenario.silos.hosts is not None:
        return Hosting(_dealt(names, min(scenario.silos.hosts, len(names)), room))
    count = len(names)
    memory, descriptors = count * _SILO_MEMORY + _OTHER_MEMORY, _DESCRIPTORS * count + OTHER_DESCRIPTORS
    if descriptors > limits.descriptors:
        need = f"{descriptors} open files, and {limits.descriptors:.0f} are allowed"
    elif memory > limits.memory:
        need = f"{size_text(memory)} of memory, and {size_text(limits.memory)} are available"
    else:
        return Hosting()
    hosts = _dealt(names, min(count, 2 * scenario.slots), room)
    return Hosting(hosts, f"{count} silos share {len(hosts)} host processes: a process for each needs about {need}")


def _dealt(names: tuple[str, ...], count: int, room: int) -> tuple[tuple[str, ...], ...]:
    """Distribute the silos over hosts in turn: at least ``count`` hosts, of at most ``room`` silos each."""
    hosts = max(count, -(-len(names) // room))
    return tuple(names[index::hosts] for index in range(hosts))


#: Exit code of a process whose parent is gone.
_ORPHANED = 1


def set_up_child(*, terminable: bool = True) -> None:
    """Ignore Ctrl-C, which the parent handles, and make sure that this process does not outlive the parent.

    The kernel's parent is the forkserver, which outlives this process's parent if another process started it. So a
    thread waits for the end of the actual parent. The coordinator ignores SIGTERM: the parent stops it by a message, so
    that it can finish writing.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL if terminable else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_with, args=(parent.sentinel,), name="parent", daemon=True).start()
    end_with_forkserver(signal.SIGKILL)


def _exit_with(sentinel: int) -> None:
    """Exit immediately when another process ends; the run can be resumed from its checkpoint."""
    wait([sentinel])
    os._exit(_ORPHANED)


def report(line: Connection, item: object) -> None:
    """Send an item to the parent; exit if the parent is gone."""
    try:
        line.send(item)
    except ConnectionError:
        os._exit(_ORPHANED)


def report_result(line: Connection, work: Callable[[], object]) -> None:
    """Send what ``work`` returns to the parent, or its error in a form that :func:`raise_reported` knows."""
    try:
        result = work()
    except InputError as error:
        report(line, (error.place, str(error.found), error.allowed))
    except FedmqError as error:
        report(line, (str(error),))
    else:
        report(line, result)


def raise_reported(item: object) -> None:
    """Raise the error that a child reported, if the item is one."""
    match item:
        case (str(place), str(found), str(allowed)):
            raise InputError(place, found, allowed)
        case (str(text),):
            raise RunError(text)


def ignore_sigterm() -> None:
    """Ignore SIGTERM, with which the parent stops silos that have not joined and an evaluator without a result.

    From then on, the coordinator stops this process by a message.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def coordinator_process(arguments: CoordinatorArguments, line: Connection) -> None:
    """Run the coordinator; sends its status, its orders and finally its result to the parent."""
    set_up_child(terminable=False)
    parent, tell = _Parent(line), partial(report, line)
    order, wants_stop = parent.carry_out, parent.wants_stop
    run = partial(run_coordinator, arguments, listening=tell, status=tell, stop_wanted=wants_stop, order=order)
    report_result(line, run)


class _Parent:
    """The coordinator's end of the line to its parent, which says ``stop``, and ``done`` after each order."""

    def __init__(self, line: Connection) -> None:
        self._line, self._stopping = line, False

    def wants_stop(self) -> bool:
        self._stopping = self._stopping or self._line.poll(0)
        return self._stopping

    def carry_out(self, order: ProcessCommand) -> None:
        """Send the order of a scripted fault, and wait until it is carried out; ``die`` ends this process."""
        report(self._line, order)
        if order.what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while self._line.recv() != "done":
                self._stopping = True
        except (EOFError, ConnectionError):
            os._exit(_ORPHANED)


def peer_process(arguments: PeerArguments) -> None:
    """Run a silo, a host of several silos, or the evaluator."""
    set_up_child()
    try:
        match arguments:
            case SiloArguments():
                run_silo(arguments, joined=ignore_sigterm)
            case HostArguments():
                run_host(arguments, joined=ignore_sigterm)
            case EvaluatorArguments():
                run_evaluator(arguments, measured=ignore_sigterm)
    except FedmqError as error:
        print_line(f"fedmq: {error}", error=True)
        sys.exit(2 if isinstance(error, InputError) else 1)


#: Maximum number of restarts of a process; if it dies once more, the run fails.
_MAX_RESTARTS = 3
#: Time for the processes to end by themselves before they are killed [s].
_STOP_PATIENCE = 20.0
#: Time before an evaluator without a result receives SIGTERM [s].
_EVALUATOR_GRACE = 1.0
#: Names of the host processes, with a number.
_HOST = "host-"
#: Time after which a message says that the processes are still stopping [s].
_SLOW_STOP_SECONDS = 2.0


def _host_name(index: int) -> str:
    return f"{_HOST}{index}"


@dataclass
class ProcessGroup:
    """The processes of one run."""

    run: ResolvedRun
    folder: RunFolder
    keys: Path  # private folder with the keys created for this run
    resume: bool  # resume from the last checkpoint
    data: Path | None  # folder of the prepared data; None lets every process find it
    hosting: Hosting
    logs: LogOptions | None = None  # settings of the log for operators; None for no log
    cluster: Cluster | None = None  # starts the silos and the evaluator on other machines; None starts them here
    sites: Mapping[str, Site] = field(default_factory=dict)  # the sites by name, if they have data of their own
    stopped: set[str] = field(default_factory=set)  # hosted silos that a fault of the scenario keeps away
    processes: dict[str, ForkServerProcess | RemoteProcess] = field(default_factory=dict)
    deaths: dict[str, int] = field(default_factory=dict)
    frozen: dict[str, float] = field(default_factory=dict)
    peak_pss: int = 0
    uri: str = ""
    patience: float = _STOP_PATIENCE
    stopping: float | None = None

    def start_coordinator(self) -> Connection:
        """Start the coordinator; returns the connection on which it reports."""
        ours, theirs = CONTEXT.Pipe()
        here = f"{self.run.scenario.wire.transport or 'shm'}://{self.keys.parent / 'wire'}"
        address = here if self.cluster is None else self.cluster.bind
        bind = f"{SHARED if self.hosting.hosts else ''}{address}"
        root, most = self.folder.root, self.hosting.most
        arguments = CoordinatorArguments(self.run, bind, self.keys, root, self.resume, self.data, most, True, self.logs)
        self._start(COORDINATOR, coordinator_process, arguments, theirs)
        theirs.close()
        return ours

    @property
    def coordinator(self) -> ForkServerProcess:
        """The coordinator, which runs on this machine."""
        process = self.processes[COORDINATOR]
        assert isinstance(process, ForkServerProcess)  # noqa: S101 - started by start_coordinator
        return process

    def start_peers(self, uri: str) -> None:
        """Start the evaluator and every silo or host that is not running yet."""
        self.uri = uri
        silos = [_host_name(index) for index in range(len(self.hosting.hosts))] or self.run.scenario.silo_names
        for name in (*([EVALUATOR] if self.run.scenario.evaluator else []), *silos):
            if name not in self.processes:
                self.start_peer(name)

    def start_peer(self, name: str) -> None:
        """Start or restart a silo, a host or the evaluator."""
        root, site = self.folder.root, self.sites.get(name)
        if name == EVALUATOR:
            evaluator = EvaluatorArguments(self.run, self.uri, self.keys, root, None, self.data, site, self.logs)
            self._start(name, peer_process, evaluator)
            return
        index = int(name.removeprefix(_HOST)) if self.hosting.hosts else 0
        hosted = self.hosting.hosts[index] if self.hosting.hosts else (name,)
        names = tuple(silo for silo in hosted if silo not in self.stopped)
        if not names:
            return
        silo = SiloArguments(self.run, names[0], self.uri, self.keys, root, data=self.data, site=site, logs=self.logs)
        silo = replace(silo, simulated=self.cluster is None)
        host = HostArguments(names, silo, self.hosting.most, index)
        self._start(name, peer_process, host if self.hosting.hosts else silo)

    def _process_of(self, name: str) -> str:
        """The process of a silo: its host, or itself."""
        hosts = enumerate(self.hosting.hosts)
        return next((_host_name(index) for index, names in hosts if name in names), name)

    def execute(self, order: ProcessCommand, line: Connection) -> Connection:
        """Execute an order of a scripted fault; such deaths do not count towards the limit of restarts.

        Returns:
            The connection to the coordinator, another one if it was restarted.
        """
        name = self._process_of(order.name)
        process = self.processes.get(name)
        match order.what:
            case "die":
                return self.restart_coordinator()
            case "freeze" if isinstance(process, ForkServerProcess) and process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGSTOP)
                self.frozen[name] = time.monotonic() + order.seconds
            case "kill" if process is not None:
                self._restart(name)
            case "stop" | "start" if name != order.name:
                # The host continues without the silo, or with it again.
                (self.stopped.add if order.what == "stop" else self.stopped.discard)(order.name)
                self._restart(name)
            case "stop" if process is not None:
                self._kill(name)
            case "start" if process is None:
                self.start_peer(name)
            case _:
                pass
        with contextlib.suppress(OSError):
            line.send("done")
        return line

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
                if isinstance(process, ForkServerProcess) and process.pid is not None and process.is_alive():
                    os.kill(process.pid, signal.SIGCONT)

    def restart_coordinator(self) -> Connection:
        """Restart the coordinator from its checkpoint; silos that had left rejoin, as it waits for all silos."""
        self.processes[COORDINATOR].join()
        self.resume = True
        return self.start_coordinator()

    def _start(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        if self.cluster is not None and name != COORDINATOR:
            self.processes[name] = self.cluster.start(name, *arguments)
            return
        process = CONTEXT.Process(target=child(name, target), args=arguments, name=name, daemon=True)
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
        """Print once that the run is still stopping, if that takes a long time."""
        if self.stopping is not None and time.monotonic() - self.stopping > _SLOW_STOP_SECONDS:
            self.stopping = None
            print_line("stopping: waiting for the processes to end", error=True)

    def _wait(self, running: Sequence[ForkServerProcess | RemoteProcess]) -> None:
        """Wait a moment for one of the processes to end."""
        if self.cluster is None:
            wait([process.sentinel for process in running if isinstance(process, ForkServerProcess)], 0.5)
        else:
            time.sleep(0.1)

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
                self._wait(running)
                self.report_slow_stop()
            if COORDINATOR in self.processes:
                self.processes[COORDINATOR].join(0.1)
        finally:
            alive = [process for process in self.processes.values() if process.is_alive()]
            for process in alive:
                process.kill()
            for process in alive:
                process.join()
