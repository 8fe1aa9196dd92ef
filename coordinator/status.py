"""Tells a run's status: to a display, in ``status.json`` of the run folder, and to inquiries of silos and operators."""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import filterfalse

from coordinator.counters import Counters
from coordinator.data_admission import Admission, OwnDataAdmission
from coordinator.evaluation import EvaluationRequests
from coordinator.liveness import TaskLimits
from coordinator.peers import Peers
from coordinator.round_events import Phase
from coordinator.rounds import Rounds
from coordinator.run_context import RunContext
from fedmq.clock import Clock
from fedmq.config.run_id import KeyDigests, keys_in, named, without_machine
from fedmq.config.yaml_files import dump
from fedmq.errors import DivergedError, FedmqError, RemoteWireError
from fedmq.evaluation.metrics import BRIEF
from fedmq.federation.agreement import FormatError
from fedmq.federation.population import run_name
from fedmq.packages import versions
from fedmq.profiling import span
from fedmq.runs.data_records import StatedFormat
from fedmq.runs.results import gallery_with, meaningful, own_gallery
from fedmq.runs.run_records import MergeLine, OwnHeldOutLine
from fedmq.runs.status import (
    ERROR_CHARACTERS,
    FAILED,
    STATUS_SECONDS,
    CoordinatorFacts,
    Offer,
    SiloPhase,
    SiloStatus,
    Status,
    StatusFile,
)
from fedmq.storage.logs import Logger
from fedmq.storage.run_folder import write_text
from fedmq.text import printable
from fedmq.wire.channel import BEAT_SECONDS
from fedmq.wire.inquiry import OTHER_SCENARIO
from fedmq.wire.limits import BoundedDict
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import EVALUATOR, Kind, Reason
from fedmq.wire.payloads import MAX_STATUS, Error, RunStatus
from fedmq.wire.sessions import Session, open_message

#: Interval between two reports to the display [s].
_SHOW_SECONDS = 0.2


class StatusReport:
    """The status of one coordinator process."""

    def __init__(
        self,
        run_context: RunContext,
        clock: Clock,
        roster: Peers,
        counters: Counters,
        evaluation: EvaluationRequests,
        show: Callable[[Status], None],  # called with a Status a few times per second
        logger: Logger,
    ) -> None:
        self._run_context, self._clock, self._roster, self._counters = run_context, clock, roster, counters
        self._evaluation, self._show, self._logger = evaluation, show, logger
        self._names = run_context.scenario.silo_names
        samples = dict(zip(self._names, run_context.samples, strict=True))
        scenario = run_context.scenario
        # Times and limits of pending tasks.
        self.limits = TaskLimits(scenario.aggregation.task_limit, samples, scenario.training.local_epochs)
        self._run = run_name(run_context.scenario)
        self._began = self._shown = clock.stopwatch()
        self._written = -math.inf  # so that the first update writes the file
        self._heard: dict[str, str] = {}
        self._loss: float | None = None
        self._seen = set[str]()
        self._error: FedmqError | None = None
        self.latest: StatusFile | None = None  # the last status written; None before the first
        self._reported = evaluation.metrics_version
        known = run_context.evaluated
        self._gallery = None if known is None else gallery_with(known)

    def merged(self, line: MergeLine) -> None:
        """A merge is done."""
        self._loss = line.loss
        values = {} if line.loss is None else {"loss": round(line.loss, 4)}
        self._logger.info("merged", round=line.version, replies=len(line.replies), **values)

    def received(self, silo: str) -> None:
        """A silo's reply was received: its last error is out of date, unless its task is overdue."""
        if silo not in self.limits.overdue:
            self._roster.failures.pop(silo, None)

    def failed(self, silo: str, why: str) -> None:
        """A silo reported an error, or its task failed."""
        self._roster.failures[silo] = printable(why)[:ERROR_CHARACTERS]

    def ended_by(self, error: FedmqError, rounds: Rounds) -> None:
        """An error ends the run."""
        self._error = error
        self.update(rounds, self._seen, force=True)

    @span("disk")
    def update(self, rounds: Rounds, seen: set[str], *, force: bool = False) -> None:
        """Report the status, unless it was reported just before; ``seen`` are the silos that have joined."""
        now, self._seen = self._clock.stopwatch(), seen
        if (version := self._latest_round()) != self._reported:
            self._reported, found = version, self._latest()
            brief = {name: round(found[name], 4) for name in BRIEF if name in found}
            self._logger.info("evaluated", round=version, **brief)
        if force or now - self._shown >= _SHOW_SECONDS:
            self._shown = now
            self._show(self._status(rounds, seen, now))
        if force or now - self._written >= STATUS_SECONDS:
            self._written, self.latest = now, self._file(rounds, seen, now)
            # A run does not depend on this file: if the disk is full, the next checkpoint reports it.
            with contextlib.suppress(FedmqError):
                text = self.latest.model_dump_json(exclude={"coordinator"}, indent=2)
                write_text(self._run_context.folder.status, f"{text}\n")

    @property
    def _own(self) -> OwnHeldOutLine | None:
        """The latest evaluation on the silos' own held-out items, which counts in a run without an evaluator."""
        return None if self._evaluation.evaluators else self._evaluation.own.last

    def _latest_round(self) -> int | None:
        """The latest round evaluated; None before the first evaluation."""
        return self._evaluation.metrics_version if self._own is None else self._own.version

    def _latest(self) -> dict[str, float]:
        """Its metrics, without recalls that every model reaches."""
        if self._own is None:
            return meaningful(self._evaluation.metrics, self._gallery)
        return meaningful(self._own.metrics, own_gallery(self._own))

    def _status(self, rounds: Rounds, seen: set[str], now: float) -> Status:
        roster, counters = self._roster, self._counters
        return Status(
            phase=rounds.phase.value,
            round=rounds.version,
            rounds=self._run_context.scenario.rounds,
            training=sum(map(roster.online, rounds.pending)),
            missing=tuple(filterfalse(roster.online, (*self._names, *self._evaluation.evaluators))),
            refused=(dict(roster.refused), roster.refusal),
            refused_ago=now - roster.refused_at,
            online=sum(map(roster.online, self._names)),
            lost=sum(not roster.online(name) for name in seen),
            loss=self._loss,
            metrics=self._latest(),
            metrics_round=self._latest_round(),
            bytes=counters.up.total() + counters.down.total(),
            now=self._clock.now(),
            elapsed=now - self._began,
            slow=(
                *self._slow_evaluator(now),
                *((each.silo, each.seconds, each.limit) for each in self.limits.slow(now)),
            ),
            overdue=(*self.limits.overdue, *((EVALUATOR,) if self._evaluation.limit.exceeded else ())),
            minimum=rounds.plan.minimum,
        )

    def _slow_evaluator(self, now: float) -> tuple[tuple[str, float, float | None], ...]:
        limit = self._evaluation.limit
        slow = limit.is_slow(now) and self._roster.online(EVALUATOR) and not limit.exceeded
        return ((EVALUATOR, limit.seconds(now), limit.limit),) if slow else ()

    def _file(self, rounds: Rounds, seen: set[str], now: float) -> StatusFile:
        roster, counters = self._roster, self._counters
        for name, at in {**roster.joining(), **roster.heard()}.items():
            self._heard[name] = self._clock.utc(at)
        return StatusFile(
            run=self._run,
            written=self._clock.utc(),
            phase=rounds.phase.value if self._error is None else FAILED,
            error="" if self._error is None else printable(str(self._error))[:ERROR_CHARACTERS],
            round=rounds.version,
            rounds=self._run_context.scenario.rounds,
            loss=self._loss,
            diverged=isinstance(self._error, DivergedError),
            metrics=self._latest(),
            metrics_round=self._latest_round(),
            evaluated=self._run_context.evaluated,
            up=counters.up.total(),
            down=counters.down.total(),
            now=self._clock.now(),
            elapsed=round(now - self._began, 3),
            refused=dict(roster.refused),
            last_refused=printable(roster.refusal)[:ERROR_CHARACTERS],
            last_refused_at=self._clock.utc(roster.refused_at) if roster.refusal else None,
            silos={name: self._silo(name, rounds, seen, now) for name in self._names},
            evaluator=self._evaluator(rounds, now) if self._evaluation.evaluators else None,
        )

    def _evaluator(self, rounds: Rounds, now: float) -> SiloStatus:
        limit, online = self._evaluation.limit, self._roster.online(EVALUATOR)
        seconds = limit.seconds(now) if online else 0.0
        away = SiloPhase.LOST if EVALUATOR in self._heard else SiloPhase.ABSENT
        if self._error is not None:
            seconds = 0.0
        here = SiloPhase.WAITING if seconds and rounds.phase is Phase.DONE else self._ended(rounds) or SiloPhase.WAITING
        return SiloStatus(
            phase=SiloPhase.OVERDUE if limit.exceeded else here if online else away,
            heard=self._heard.get(EVALUATOR),
            task_seconds=round(seconds, 1) or None,
            limit=limit.limit if seconds else None,
            error=self._roster.failures.get(EVALUATOR, ""),
        )

    def _silo(self, name: str, rounds: Rounds, seen: set[str], now: float) -> SiloStatus:
        seconds = None if self._ended(rounds) is SiloPhase.STOPPED else self.limits.seconds(name, now)
        return SiloStatus(
            phase=self._phase(name, rounds, seen, training=seconds is not None),
            heard=self._heard.get(name),
            task_seconds=None if seconds is None else round(seconds, 1),
            limit=None if seconds is None else self.limits.limit(name),
            error=self._roster.failures.get(name, ""),
            up=self._counters.silo_up[name],
            down=self._counters.silo_down[name],
        )

    def _ended(self, rounds: Rounds) -> SiloPhase | None:
        """The phase of a connected peer after the end of the rounds; None before it."""
        if self._error is not None or rounds.phase is Phase.STOPPED:
            return SiloPhase.STOPPED
        return SiloPhase.DONE if rounds.phase is Phase.DONE else None

    def _phase(self, name: str, rounds: Rounds, seen: set[str], *, training: bool) -> SiloPhase:
        if name in self.limits.overdue:
            return SiloPhase.OVERDUE
        if self._roster.online(name) and (ended := self._ended(rounds)):
            return ended
        if self._roster.online(name):
            return SiloPhase.TRAINING if training else SiloPhase.WAITING
        if name in self._roster.joining() and name not in seen:  # a late silo, until the next round
            return self._ended(rounds) or SiloPhase.WAITING
        if name not in seen and name not in self._roster.failures:
            return SiloPhase.ABSENT
        return SiloPhase.GIVEN_UP if name in rounds.gone else SiloPhase.LOST


#: Maximum length of each silo's error in a status that would otherwise be too large [characters].
_SHORT_ERROR = 40
#: Time without a message after which a silo that waits for the others is shown as lost [s].
SILENT_SECONDS = 5 * BEAT_SECONDS


class Inquiries:
    """Answers inquiries for the roster."""

    def __init__(
        self,
        run: str,
        silos: Sequence[str],
        rounds: int,  # total number of rounds
        clock: Clock,
        log: MessageLog,  # the coordinator's message log, which notes each sender of an inquiry once
        admission: Admission | None = None,  # knows what the silos stated about their data
        # The scenario as plain data, of which silos and the evaluator learn digests; None tells nothing.
        scenario: Mapping[str, object] | None = None,
    ) -> None:
        self._admission, self._scenario = admission, scenario
        self._run, self._silos, self._rounds, self._clock, self._log = run, tuple(silos), rounds, clock, log
        self._asked: set[str] = set()
        # The last status of the rounds; None before the first.
        self.latest: Callable[[], StatusFile | None] = lambda: None

    def answer(self, name: str, peers: Peers) -> RunStatus:
        """The answer to the holder of a key; before the rounds begin, the state of the peers is the status."""
        if name not in self._asked:
            self._asked.add(name)
            self._log.note(LogEvent.STATUS_REQUESTED, peer=name)
        facts = self._facts(name)
        status = (self.latest() or self._before(peers)).model_copy(update={"coordinator": facts})
        text = status.model_dump_json()
        if len(text.encode()) > MAX_STATUS:
            short = {
                silo: each.model_copy(update={"error": each.error[:_SHORT_ERROR]})
                for silo, each in status.silos.items()
            }
            facts = facts.model_copy(update={"format": None})
            text = status.model_copy(update={"silos": short, "coordinator": facts}).model_dump_json()
        return RunStatus(text)

    def tells_scenario(self, name: str) -> bool:
        """Whether the sender of an inquiry, a silo of the run or the evaluator, learns digests of the scenario."""
        return self._scenario is not None and name in (*self._silos, EVALUATOR)

    def _facts(self, name: str) -> CoordinatorFacts:
        """Facts about this process; only silos and the evaluator learn the format of the run's data."""
        here, scenario, offer = versions(), None, None
        if self._scenario is not None and self.tells_scenario(name):
            scenario = KeyDigests.of(self._scenario, secrets.token_bytes(16))
            offer = Offer(scenario=dump(without_machine(self._scenario)), log=self._log.first)
        if not isinstance(self._admission, OwnDataAdmission) or name not in (*self._silos, EVALUATOR):
            return CoordinatorFacts(versions=here, scenario=scenario, offer=offer)
        try:
            held = self._admission.likely
        except FormatError:  # the data stated so far do not fit together, or one modality is in none of them
            held = None
        agreed = None if held is None else StatedFormat.of(held)
        committed = self._admission.agreed is not None
        return CoordinatorFacts(versions=here, format=agreed, committed=committed, scenario=scenario, offer=offer)

    def _before(self, peers: Peers) -> StatusFile:
        heard = {**peers.heard(), **peers.joining()}
        silos = {name: self._before_rounds(name, peers, heard.get(name)) for name in self._silos}
        return StatusFile(
            run=self._run,
            written=self._clock.utc(),
            phase=Phase.GATHERING.value,
            round=0,
            rounds=self._rounds,
            loss=None,
            metrics={},
            up=0,
            down=0,
            now=self._clock.now(),
            elapsed=0.0,
            refused=dict(peers.refused),
            last_refused=printable(peers.refusal)[:ERROR_CHARACTERS],
            last_refused_at=self._clock.utc(peers.refused_at) if peers.refusal else None,
            silos=silos,
        )

    def _before_rounds(self, name: str, peers: Peers, heard: float | None) -> SiloStatus:
        """The status of a silo that was heard last at a stopwatch's time [s]; None if it has no session."""
        error = peers.failures.get(name, "")
        if heard is None:
            away = SiloPhase.LOST if error else SiloPhase.ABSENT
            return SiloStatus(phase=SiloPhase.WAITING if peers.online(name) else away, error=error)
        silent = self._clock.stopwatch() - heard > SILENT_SECONDS
        phase = SiloPhase.LOST if silent else SiloPhase.WAITING
        return SiloStatus(phase=phase, heard=self._clock.utc(heard), error=error)


#: Maximum number of inquiries that are remembered, the oldest are forgotten; and size of a report [bytes].
_MAX_SESSIONS, _MAX_BODY = 256, 4096


class ScenarioReports:
    """Reads the one message that may follow the answer to an inquiry.

    Args:
        log: the coordinator's message log, which notes each report once.
    """

    def __init__(self, log: MessageLog) -> None:
        self._log = log
        self._sessions = BoundedDict[bytes, Session](_MAX_SESSIONS)
        self._noted: set[tuple[str, str]] = set()

    def expect(self, address: bytes, session: Session) -> None:
        """An inquiry of a silo or the evaluator was answered, with the digests of the scenario."""
        self._sessions[address] = session

    def take(self, address: bytes, frames: Sequence[memoryview]) -> tuple[str, str] | None:
        """The sender of a report and its keys as text; None if no inquiry on this connection was answered.

        Raises:
            RemoteWireError: the message is not authentic, or no report.
        """
        session = self._sessions.pop(address, None)
        if session is None:
            return None
        message, _ = open_message(session, frames, max_body=_MAX_BODY)
        match message.header.kind, message.payloads:
            case Kind.ERROR, (Error(code=code, text=text),) if code == OTHER_SCENARIO:
                keys = keys_in(text)
            case _:
                raise RemoteWireError(Reason.UNEXPECTED, f"a {message.header.kind} after an inquiry")
        if keys is None:
            raise RemoteWireError(Reason.MALFORMED, f"{session.peer} does not list keys of a scenario")
        found = session.peer, named(keys)
        if found not in self._noted:
            self._noted.add(found)
            self._log.note(LogEvent.OTHER_SCENARIO, peer=session.peer, keys=named(keys))
        return found
