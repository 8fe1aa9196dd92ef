"""The coordinator program: set up the loop, run it, and have the results written."""

from __future__ import annotations

import contextlib
import json
import math
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from coordinator import checkpoints
from coordinator.counters import Counters
from coordinator.data_admission import Admission, OwnDataAdmission
from coordinator.evaluation import EvaluationRequests
from coordinator.faults import FaultInjector, ProcessCommand
from coordinator.gathering import admission_of, gathered, included
from coordinator.liveness import dismiss_all
from coordinator.loop import Loop
from coordinator.peers import InProcessPeers, PeerFunctions, Peers
from coordinator.release import BestModel
from coordinator.round_events import Phase
from coordinator.rounds import Rounds
from coordinator.run_context import RunContext, largest_body, own_largest_body, run_context_of
from coordinator.secure_sums import SecureSums
from coordinator.sessions import Roster
from coordinator.status import Inquiries, StatusReport
from coordinator.summary import finish
from fedmq.clock import Clock, clock_for
from fedmq.config.faults import wire_over
from fedmq.config.resolve import ResolvedRun
from fedmq.config.scenario import Scenario
from fedmq.errors import FedmqError, InputError
from fedmq.federation.agreement import RunData
from fedmq.federation.population import Population, build_population
from fedmq.packages import __version__
from fedmq.runs import prometheus
from fedmq.runs.report import run_report
from fedmq.runs.results import read_metrics
from fedmq.runs.run_records import EvaluationLine, PersonalLine, RunSummary
from fedmq.runs.status import Status, StatusFile
from fedmq.storage.logs import LogOptions, open_log
from fedmq.storage.run_folder import RunFolder, remove_unfinished, write_text
from fedmq.wire.channel import BEAT_SECONDS
from fedmq.wire.codec import keep_buffers
from fedmq.wire.keys import AcceptedKeys, Identity, load_accepted, load_identity
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog, StartFacts
from fedmq.wire.messages import COORDINATOR, EVALUATOR
from fedmq.wire.sessions import MAX_PREFIX, TAG_BYTES, padded_size
from fedmq.wire.transports.base import QUEUE, Listener
from fedmq.wire.transports.registry import listen
from fedmq.wire.transports.shared_connections import beat_patience
from fedmq.wire.transports.tickets import ListenerKeys

#: File descriptors of any process of a run: its imports, locks, sockets and ZeroMQ's threads.
OTHER_DESCRIPTORS = 64
#: File descriptors for connections over TCP that are not admitted yet.
_UNADMITTED = 32


@dataclass(frozen=True)
class CoordinatorArguments:
    """How a coordinator is started."""

    run: ResolvedRun
    bind: str  # URI to listen on
    keys: Path  # folder with the coordinator's key and the public keys of all peers
    out: Path  # the run folder; created if missing
    resume: bool = False  # resume from the run folder's last checkpoint
    data: Path | None = None  # folder of the prepared data; None to look it up
    silos_per_connection: int = 1  # maximum number of silos that share a connection, see shared_connections
    # Whether a stop also ends the silos and the evaluator; by default they wait for the coordinator.
    stop_silos: bool = False
    logs: LogOptions | None = None  # options of the log for operators; None for no log
    metrics_port: int | None = None  # port on 127.0.0.1 for Prometheus; None for no endpoint
    # Write ``report.html`` of the run's records; false where the parent writes one that shows more.
    report: bool = False
    # Minimum time from one checkpoint to the next [s]; 0 writes one after each merge.
    checkpoint_seconds: float = 0.0

    @property
    def scenario(self) -> Scenario:
        """The run's scenario, as resolved."""
        return self.run.scenario


@dataclass(frozen=True)
class CoordinatorResult:
    """How a run ended."""

    phase: Phase  # ``DONE`` or ``STOPPED``
    summary: RunSummary | None  # content of ``summary.json``; None if stopped


def run_coordinator(
    arguments: CoordinatorArguments,
    *,
    listening: Callable[[str], None] = lambda _: None,
    status: Callable[[Status], None] = lambda _: None,
    stop_wanted: Callable[[], bool] = lambda: False,
    peers: Callable[[Population], PeerFunctions] | None = None,
    order: Callable[[ProcessCommand], None] | None = None,
) -> CoordinatorResult:
    """Run a coordinator from the first round, or from a checkpoint, to the end.

    Args:
        arguments: how the coordinator is started.
        listening: called with the URI once silos can connect.
        status: called with the run's status a few times per second.
        stop_wanted: called between events; true stops the run cleanly, to be resumed later.
        order: executes the process commands of injected faults; None without a supervisor.
        peers: makes silos and evaluator functions of this process; None has them connect.

    Raises:
        InputError: a key, the data or a checkpoint is invalid.
        RunError: the run cannot continue.
    """
    torch.set_num_threads(1)  # merges are sums over one buffer; more threads would compete with the silos for cores
    keep_buffers()
    scenario, run, folder = arguments.scenario, arguments.run, RunFolder(arguments.out)
    identity, accepted = _keys(arguments) if peers is None else (None, None)
    population = build_population(scenario, folder=arguments.data, pooled=run.pooled) if scenario.data else None
    saved = checkpoints.load(folder.checkpoints) if arguments.resume else None
    data = None if population is None else population.counted(scenario)
    setting = None if data is None else _resumable(arguments, data, saved, accepted)
    clock = clock_for(scenario.clock, saved.now if saved else 0.0)
    began = clock.stopwatch()
    with contextlib.ExitStack() as closing:
        admission = None if peers is not None else admission_of(run, folder, population, saved)
        max_body, wire = own_largest_body(scenario) if setting is None else largest_body(setting[0]), None
        if identity is not None and accepted is not None:
            # Before anything is written, so that an unusable address leaves no folder behind.
            wire = closing.enter_context(contextlib.closing(_listener(arguments, identity, accepted, max_body)))
        log = closing.enter_context(contextlib.closing(_begun_log(arguments, clock, saved)))
        if peers is not None and population is not None:
            log.note(LogEvent.INLINE)
            roster: Peers = InProcessPeers(peers(population), run.id, log, clock, folder)
            closing.callback(roster.close)
        else:
            roster = _roster(arguments, wire, (identity, accepted), data, log, clock, max_body, admission)
        log.logger.info("listening", uri=roster.uri, silos=len(scenario.silo_names))
        listening(roster.uri)
        if isinstance(roster, Roster) and isinstance(admission, OwnDataAdmission):
            data = gathered(roster, admission, scenario, folder, log, status, stop_wanted)
        if data is None:
            if arguments.stop_silos:
                dismiss_all(roster, _peer_names(scenario), scenario.aggregation.lost_after, clock, log.logger)
            return _ended(log, roster, Phase.STOPPED, None, log.note(LogEvent.STOP_REQUESTED))
        process = _Process(arguments, clock, roster, log, admission, order, status, stop_wanted, accepted, began)
        if isinstance(roster, Roster) and roster.inquiries is not None:
            roster.inquiries.latest = process.latest
        if arguments.metrics_port is not None:
            closing.callback(prometheus.serve(arguments.metrics_port, process.latest))
        return process.run(data, setting, saved)


def _ended(
    log: MessageLog, peers: Peers, phase: Phase, summary: RunSummary | None, cause: int | None
) -> CoordinatorResult:
    peers.pause()
    log.note(LogEvent.ENDED, phase=phase.value, caused_by=cause)
    return CoordinatorResult(phase, summary)


def _peer_names(scenario: Scenario) -> tuple[str, ...]:
    return (*scenario.silo_names, *([EVALUATOR] if scenario.evaluator else ()))


def _roster(
    arguments: CoordinatorArguments,
    listener: Listener | None,
    keys: tuple[Identity | None, AcceptedKeys | None],
    data: RunData | None,
    log: MessageLog,
    clock: Clock,
    max_body: int,
    admission: Admission | None,
) -> Roster:
    """The peers that connect; this process declares its start in its log."""
    identity, accepted = keys
    restarted = log.records > 1  # the first record is the note of this start
    assert listener is not None and identity is not None and accepted is not None  # noqa: S101 - silos connect
    log.start(identity, accepted, StartFacts.of(arguments.run, "" if data is None else data.content))
    scenario, names, rounds = arguments.scenario, arguments.scenario.silo_names, arguments.scenario.rounds
    patience, run = beat_patience(arguments.silos_per_connection), arguments.run.id
    roster = Roster(
        listener,
        identity,
        accepted,
        run,
        log,
        clock,
        max_body,
        patience=patience,
        admission=admission,
        names=(*names, EVALUATOR),
        options=wire_over(listener.uri, scenario.wire, scenario.faults),
        restarted=restarted,
    )
    plain = scenario.model_dump(mode="json")
    roster.inquiries = Inquiries(run, names, rounds, clock, log, admission, plain)
    return roster


def allow_descriptors(connections: int, bind: str) -> None:
    """Raise this process's limit of open files to the system's maximum, as each connection takes one.

    Raises:
        InputError: the maximum is too low for the connections.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    needed = connections + OTHER_DESCRIPTORS + (_UNADMITTED if bind.startswith("tcp:") else 0)
    if most != resource.RLIM_INFINITY and most < needed:
        allowed = f"at least {needed} for {connections} connections: raise `ulimit -Hn`, or LimitNOFILE= of systemd"
        raise InputError("open files of this process (ulimit -Hn)", most, allowed)


def _listener(arguments: CoordinatorArguments, identity: Identity, accepted: AcceptedKeys, max_body: int) -> Listener:
    """Listen for silos; frames up to twice the largest body are read, so that their refusal is logged by name."""
    peers = len(arguments.scenario.silo_names) + 1  # with the evaluator
    allow_descriptors(math.ceil(peers / arguments.silos_per_connection), arguments.bind)
    keys = ListenerKeys(identity.key.public_key(), accepted)
    queue = QUEUE * arguments.silos_per_connection
    largest = max(2 * max_body, padded_size(max_body + MAX_PREFIX) + TAG_BYTES)
    return listen(arguments.bind, max_frame=largest, queue=queue, keys=keys)


def _resumable(
    arguments: CoordinatorArguments, data: RunData, saved: checkpoints.Checkpoint | None, accepted: AcceptedKeys | None
) -> tuple[RunContext, torch.Tensor]:
    """The result of :func:`run_context_of`, if the run can begin or resume with it.

    Raises:
        InputError: as raised there; no eligible silo is left; the data or the trace is not what the run began with.
    """
    with arguments.run.source.naming_the_file():
        setting = run_context_of(arguments.scenario, data, RunFolder(arguments.out))
    run_context, folder = setting[0], setting[0].folder
    trace = run_context.scenario.participation.trace
    eligible = run_context.plan.eligible
    if accepted is not None and accepted.keys().isdisjoint(eligible):
        found = f"no key of any silo that {arguments.scenario.protocol.label} can select"
        raise InputError(f"{arguments.keys}: accepted", found, f"that of {eligible[0]} or another eligible silo")
    if saved:
        checkpoints.check_fits(folder.checkpoints, saved, run_context.scenario.rounds, run_context.scenario.silo_names)
    if saved and saved.data != run_context.data:
        found = f"data of other content than the run began with ({run_context.data[:12]})"
        raise InputError(f"{folder.root}: the data", found, f"the run's data ({saved.data[:12]})")
    if saved and saved.trace != run_context.trace_file:
        found = f"another trace than the run began with ({run_context.trace_file[:12]})"
        raise InputError(f"participation.trace: {trace}", found, f"the run's trace ({saved.trace[:12]})")
    return setting


def _begun_log(arguments: CoordinatorArguments, clock: Clock, saved: checkpoints.Checkpoint | None) -> MessageLog:
    """The run's log with a note of its start; the scenario is written next to it if it is missing."""
    folder = RunFolder(arguments.out)
    if not folder.scenario.exists():
        write_text(folder.scenario, arguments.scenario.dump())
    logger = open_log(arguments.logs, COORDINATOR)
    log = MessageLog(folder.messages(COORDINATOR), COORDINATOR, clock, logger=logger)
    if saved:
        remove_unfinished(folder.root, folder.model)
    kind, version = (LogEvent.RESUMED, saved.rounds.version) if saved else (LogEvent.STARTED, 0)
    log.note(kind, run=arguments.run.id, version=version, program=__version__)
    return log


def _keys(arguments: CoordinatorArguments) -> tuple[Identity, AcceptedKeys]:
    """The coordinator's key and the accepted public keys; those of some silos may be accepted later.

    Raises:
        InputError: a key is missing; of a run that can do without some silos, the evaluator's or those of all silos.
    """
    identity, accepted = load_identity(arguments.keys, COORDINATOR), load_accepted(arguments.keys)
    silos = arguments.scenario.silo_names
    evaluator = [EVALUATOR] if arguments.scenario.evaluator else []
    missing = [name for name in (*silos, *evaluator) if name not in accepted]
    some = arguments.resume or arguments.scenario.participation.minimum is not None
    if some and EVALUATOR not in missing and len(missing) < len(silos):
        return identity, accepted
    if missing:
        every = "the evaluator and every silo" if evaluator else "every silo"
        allowed = (
            f"a public key for {every} (`fedmq keys accept`); a resumed run (--resume) or one with "
            "participation.minimum can do without a silo's"
        )
        raise InputError(f"{arguments.keys}: accepted", f"no key of {missing[0]}", allowed)
    return identity, accepted


@dataclass
class _Process:
    """State that a coordinator process keeps for the whole run, also when late silos are included."""

    arguments: CoordinatorArguments
    clock: Clock
    roster: Peers
    log: MessageLog
    admission: Admission | None
    order: Callable[[ProcessCommand], None] | None
    status: Callable[[Status], None]
    stop_wanted: Callable[[], bool]
    accepted: AcceptedKeys | None
    began: float

    def __post_init__(self) -> None:
        self._loop: Loop | None = None

    def latest(self) -> StatusFile | None:
        """The latest status, for Prometheus and for inquiries."""
        return None if self._loop is None else self._loop.status.latest

    def run(
        self, data: RunData, setting: tuple[RunContext, torch.Tensor] | None, saved: checkpoints.Checkpoint | None
    ) -> CoordinatorResult:
        """Run all rounds, and write the summary and the model."""
        counters = saved.counters if saved else Counters()
        waited = self.clock.stopwatch() - self.began  # for the silos' statements about their data
        counters.add_seconds("total", waited)
        if "startup" not in counters.seconds:
            counters.add_seconds("gathering", waited)
        while True:
            run_context, theta = setting or _resumable(self.arguments, data, saved, self.accepted)
            if saved is None and set(run_context.steps.values()) == {1}:
                self.log.note(LogEvent.ONE_STEP_TASKS, batch_size=run_context.scenario.training.batch_size)
            loop, earlier = self._loop_of(run_context, theta, saved, counters), self._loop
            self._loop = loop
            if run_context.scenario.evaluation.keep != "last":
                loop.evaluation.best = BestModel(run_context, data)
            with _noted_in_status(loop):
                phase = loop.run(continues=earlier is not None)
            loop.saving.update_counters()
            if phase is Phase.DONE:
                try:
                    with _noted_in_status(loop):
                        summary = finish(loop, data, self.clock, theta, self.admission)
                finally:
                    # Only now: the message carries the log's head, which anchors the results in the peers' logs.
                    self._dismiss(loop, 0.0 if self.arguments.stop_silos else BEAT_SECONDS)
                if self.arguments.report:
                    with run_report.warned_without_packages(run_context.folder):
                        run_report.write(run_context.folder, run_context.protocol.REPORTED)
                return _ended(self.log, self.roster, phase, summary, loop.phase_cause)
            roster, admission = self.roster, self.admission
            if (
                not loop.stopping_for_late_silos
                or not isinstance(roster, Roster)
                or not isinstance(admission, OwnDataAdmission)
            ):
                if self.arguments.stop_silos:
                    self._dismiss(loop, self.arguments.scenario.aggregation.lost_after)
                return _ended(self.log, roster, phase, None, loop.phase_cause)
            # Like a resumed coordinator, it continues from its checkpoint, but peers stay connected and counters
            # continue.
            counters.subtract(roster.sent, roster.received, roster.refused)
            folder = run_context.folder
            data = included(roster, admission, self.arguments.scenario, folder, self.log)
            saved = checkpoints.load(folder.checkpoints)

    def _dismiss(self, loop: Loop, seconds: float) -> None:
        """Tell all peers that the run is over, also those that connect within ``seconds`` [s]."""
        names, wait = _peer_names(self.arguments.scenario), seconds if self.roster.wired else 0.0
        dismiss_all(self.roster, names, wait, self.clock, self.log.logger, loop.rounds.gone)

    def _loop_of(
        self, run_context: RunContext, theta: torch.Tensor, saved: checkpoints.Checkpoint | None, counters: Counters
    ) -> Loop:
        plan, log, clock, roster = run_context.plan, self.log, self.clock, self.roster
        issued = saved.issued if saved else {}
        fault_injector = FaultInjector(
            run_context.script, run_context.folder, log, clock, order=self.order, wired=roster.wired, issued=issued
        )
        if saved is None:
            rounds, states, due = Rounds(plan), {0: run_context.protocol.initial(theta)}, dict[str, float]()
        else:
            rounds, states, due = Rounds.from_record(plan, saved.rounds), dict(saved.states), dict(saved.due)
        evaluation = EvaluationRequests(run_context, roster, log, clock, _cut_metrics(run_context, rounds.version))
        return Loop(
            run_context,
            rounds,
            states,
            clock,
            roster,
            log,
            counters,
            fault_injector,
            due,
            evaluation,
            StatusReport(run_context, clock, roster, counters, evaluation, self.status, log.logger),
            stop_wanted=self.stop_wanted,
            stop_silos=self.arguments.stop_silos,
            checkpoint_seconds=self.arguments.checkpoint_seconds,
            late_silos=lambda: isinstance(self.admission, OwnDataAdmission) and bool(self.admission.late),
            sums=self._sums(run_context),
        )

    def _sums(self, run_context: RunContext) -> SecureSums | None:
        if run_context.scenario.privacy.secure_aggregation is None:
            return None
        assert self.accepted is not None  # noqa: S101 - the silos are processes with keys
        return SecureSums(run_context, self.accepted, self.arguments.run.id, self.log)


@contextlib.contextmanager
def _noted_in_status(loop: Loop) -> Iterator[None]:
    """Write an error that ends the run into its status, so that no later reader takes the run to be in progress."""
    try:
        yield
    except FedmqError as error:
        loop.status.ended_by(error, loop.rounds)
        raise


def _cut_metrics(run_context: RunContext, version: int) -> set[int]:
    """Drop the lines of ``metrics.jsonl`` that a resumed run writes again; returns the versions evaluated already."""
    folder = run_context.folder
    kept = [line for line in read_metrics(folder) if line.version <= version]
    # The summary needs the final evaluation of personal models in memory, so a resumed run repeats it.
    rounds = run_context.scenario.rounds
    kept = [line for line in kept if not isinstance(line, PersonalLine) or line.version < rounds]
    text = "".join(json.dumps(line.plain()) + "\n" for line in kept)
    write_text(folder.metrics, text)
    return {line.version for line in kept if isinstance(line, EvaluationLine)}
