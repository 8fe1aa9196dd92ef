"""Reports the status of a run: to a display, and to ``status.json`` in the run folder."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from itertools import filterfalse

from coordinator.counters import Counters
from coordinator.evaluation import EvaluationRequests
from coordinator.liveness import TaskLimits
from coordinator.peers import Peers
from coordinator.rounds import Phase, Rounds
from coordinator.run_context import RunContext
from fedmq.clock import Clock
from fedmq.errors import DivergedError, FedmqError
from fedmq.evaluation.metrics import BRIEF
from fedmq.federation.population import run_name
from fedmq.runs.result_limits import gallery_with, meaningful, own_gallery
from fedmq.runs.run_records import MergeLine, OwnHeldOutLine
from fedmq.runs.status import ERROR_CHARACTERS, FAILED, STATUS_SECONDS, SiloPhase, SiloStatus, Status, StatusFile
from fedmq.storage.logs import Logger
from fedmq.storage.run_folder import write_json
from fedmq.text import printable
from fedmq.wire.messages import EVALUATOR

#: Interval between two reports to the display [s].
_SHOW_SECONDS = 0.2


class StatusReport:
    """The status of one coordinator process.

    Args:
        run_context: fixed facts of the run.
        clock: the run's clock.
        roster: the run's peers.
        counters: the run's counters.
        evaluation: the run's evaluation requests.
        show: called with a :class:`Status` a few times per second.
        logger: the log for operators.

    Attributes:
        limits: times and limits of pending tasks.
        latest: the last status written; None before the first.
    """

    def __init__(
        self,
        run_context: RunContext,
        clock: Clock,
        roster: Peers,
        counters: Counters,
        evaluation: EvaluationRequests,
        show: Callable[[Status], None],
        logger: Logger,
    ) -> None:
        self._run_context, self._clock, self._roster, self._counters = run_context, clock, roster, counters
        self._evaluation, self._show, self._logger = evaluation, show, logger
        self._names = run_context.scenario.silo_names
        samples = dict(zip(self._names, run_context.samples, strict=True))
        scenario = run_context.scenario
        self.limits = TaskLimits(scenario.aggregation.task_limit, samples, scenario.training.local_epochs)
        self._run = run_name(run_context.scenario)
        self._began = self._shown = clock.stopwatch()
        self._written = -math.inf  # so that the first update writes the file
        self._heard: dict[str, str] = {}
        self._loss: float | None = None
        self._seen = set[str]()
        self._error: FedmqError | None = None
        self.latest: StatusFile | None = None
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

    def update(self, rounds: Rounds, seen: set[str], *, force: bool = False) -> None:
        """Report the status, unless it was reported just before.

        Args:
            rounds: the rounds machine.
            seen: silos that have joined since the coordinator started.
            force: report it in any case.
        """
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
                write_json(
                    self._run_context.folder.status, self.latest.model_dump(mode="json", exclude={"coordinator"})
                )

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
