"""Evaluation requests: to the evaluator for the global model, and to silos for their personal models.

Silos evaluate at the end, and during the run as configured by ``evaluation.personal_every``. The checkpoint of a merge
waits for them, so that a resumed run has every line exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping

from coordinator.peers import Peers
from coordinator.run_context import RunContext
from fedmq.clock import Clock
from fedmq.errors import RemoteWireError, RunError
from fedmq.evaluation.fairness import fairness_of, means
from fedmq.federation.protocol import State
from fedmq.runs.results import read_metrics
from fedmq.runs.run_records import EvaluationLine, PersonalLine
from fedmq.storage.run_folder import append_line
from fedmq.wire.log_records import NoteKind
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import EVALUATOR, Error, Header, Kind, Message, Metrics, Payload

#: The metric that a summary requires.
_NEEDED = "mean_r1"
#: Largest median rank accepted from a silo: the maximum number of items; all other metrics are fractions.
_LARGEST_RANK = 2.0**32
#: Rounding error allowed above 1.
_ROUNDING = 1e-6
#: Maximum number of pending evaluations while rounds continue: each keeps a model in memory and one in transit.
UNDER_WAY = 8
#: Real time to wait for a lost evaluator when the run depends on it [s].
_EVALUATOR_PATIENCE = 60.0


def _complete(measured: Metrics, silos: Iterable[str]) -> bool:
    """Whether metrics have what the summary requires, for the whole split and for each of the silos."""
    return _NEEDED in measured.values and all(_NEEDED in measured.per_silo.get(name, {}) for name in silos)


def _invalid(answer: Payload | None, name: str, like: Metrics) -> str | None:
    """Why a silo's evaluation of its personal model is refused; None if it is valid.

    Summaries are means and spreads over silos of metrics that all silos have, so one silo's names or values affect all.

    Args:
        answer: the silo's answer.
        name: name of the silo.
        like: an evaluation of the evaluator, which has the same metrics.
    """
    if not isinstance(answer, Metrics):
        return "no evaluation"
    if answer.per_silo.keys() != {name}:
        return "an evaluation of other parts of the split than the silo's own"
    for found, wanted in ((answer.values, like.values), (answer.per_silo[name], like.per_silo[name])):
        if found.keys() != wanted.keys():
            odd = ", ".join(sorted(found.keys() ^ wanted.keys())[:3])
            return f"an evaluation with other metrics than the evaluator's: {odd}"
        for key, value in found.items():
            most = _LARGEST_RANK if key.endswith("_medr") else 1.0 + _ROUNDING
            if not 0.0 <= value <= most:
                return f"an evaluation with {key} {value:.4g}, allowed: 0 to {most:.4g}"
    return None


class EvaluationRequests:
    """Evaluation requests of a run and their answers.

    Args:
        run_context: fixed facts of the run.
        roster: the run's peers.
        log: the coordinator's message log.
        evaluated: versions whose evaluation is in ``metrics.jsonl`` already.

    Attributes:
        pending: versions that the evaluator has not answered for.
        unusable: pending versions whose answer was refused.
        metrics: metrics of the last version evaluated.
        personal: metrics of the personal models in the last evaluation, by silo.
    """

    def __init__(self, run_context: RunContext, roster: Peers, log: MessageLog, evaluated: Iterable[int]) -> None:
        self._run_context, self._roster, self._log = run_context, roster, log
        self._evaluated = set(evaluated)
        self._requests: dict[str, tuple[int, int, tuple[Payload, ...]]] = {}
        self._over: dict[tuple[str, int, int], bool] = {}  # True: answered; False: given up
        self.pending: list[int] = []
        self.unusable: set[int] = set()
        self.metrics: Mapping[str, float] = {}
        self.personal: dict[str, Metrics] = {}
        self._like: Metrics | None = None
        self._early: dict[str, Payload | None] = {}

    @property
    def crowded(self) -> bool:
        """Whether so many evaluations are pending that the run waits for the evaluator."""
        return len(self.pending) > UNDER_WAY

    @property
    def asked(self) -> tuple[str, ...]:
        """Silos that have not answered the evaluation request for their personal models."""
        return tuple(self._requests)

    def evaluate_if_due(self, version: int, state: State) -> None:
        """Request the evaluation of a version if it is configured and not requested or done yet."""
        every, last = self._run_context.scenario.evaluation.every, self._run_context.scenario.rounds
        if version in self.pending or version in self._evaluated:
            return
        if version in (0, last) or (every and version % every == 0):
            self.pending.append(version)
            self.evaluate(version, state)

    def evaluate(self, version: int, state: State) -> None:
        """Send or resend an evaluation request to the evaluator."""
        more = self._run_context.protocol.release(state)
        header = self._roster.header(EVALUATOR, Kind.EVALUATE, sequence=version, base_version=version)
        model = state.model(self._run_context.context.layout)
        self._roster.send(EVALUATOR, Message(header, (model, *more)))

    def evaluated(self, message: Message) -> None:
        """Validate the evaluator's answer and append it to ``metrics.jsonl``."""
        version, payload = message.header.base_version, message.payloads[0] if message.payloads else None
        if version not in self.pending:
            return
        if not isinstance(payload, Metrics) or not _complete(
            payload, [s.name for s in self._run_context.context.silos]
        ):
            detail = f"version {version}: an evaluation without {_NEEDED} of the whole split and of every silo"
            self._roster.refuse(EVALUATOR, RemoteWireError("unexpected", detail), 0)
            self.unusable.add(version)
            return
        self.pending.remove(version)
        self.unusable.discard(version)
        self._evaluated.add(version)
        self.metrics = dict(payload.values)
        per_silo = {name: dict(own) for name, own in payload.per_silo.items()}
        line = EvaluationLine(kind="evaluation", version=version, metrics=dict(self.metrics), per_silo=per_silo)
        append_line(self._run_context.folder.metrics, line.plain())
        self._like = payload
        for name in list(self._early):
            self._judge(name, self._early.pop(name), payload)

    def ask_silos(self, gone: Container[str], version: int, state: State, settled: Mapping[str, int]) -> None:
        """Prepare requests to the silos of a personalised method to evaluate their personal models locally.

        Args:
            gone: silos that were given up; they get no request.
            version: version of the shared model.
            state: the method's state at that version.
            settled: number of each silo's last settled task; the silo evaluates its state after that task.
        """
        protocol = self._run_context.protocol
        self.personal = {}
        if self._run_context.traits.personalised:
            before = [line for line in read_metrics(self._run_context.folder) if isinstance(line, EvaluationLine)]
            if before:
                self._like = Metrics(before[-1].metrics, before[-1].per_silo)
            for name in sorted(name for name in self._run_context.plan.eligible if name not in gone):
                payloads = protocol.task(state, self._run_context.facts_at(name, version))
                self._requests[name] = settled.get(name, 0), version, payloads

    def own_due(self, version: int) -> bool:
        """Whether the silos evaluate their personal models at this version; the final version is not covered here."""
        every = self._run_context.scenario.evaluation.personal_every
        if not every or version % every or version >= self._run_context.scenario.rounds:
            return False
        return self._run_context.traits.personalised

    def put_on_file(self, version: int) -> None:
        """Append the line of the personal models at a version to ``metrics.jsonl``, if configured."""
        if self._run_context.scenario.evaluation.personal_every and self.personal:
            append_line(self._run_context.folder.metrics, personal_figures(version, self.personal).plain())

    def wait(self, look: Callable[[], None], stop_wanted: Callable[[], bool], clock: Clock, *, final: bool) -> bool:
        """Wait until the silos have answered or are given up; if :attr:`crowded` or final, also for the evaluator.

        Args:
            look: receives messages and gives up absent silos; waits a fraction of a second if nothing arrives.
            stop_wanted: true ends the wait.
            clock: the run's clock.
            final: whether all rounds are merged.

        Returns:
            Whether all answers arrived; false if a stop was requested.

        Raises:
            RunError: the evaluator stays away, or its answer is unusable.
        """
        away = clock.stopwatch()
        # During the run the evaluator may be late; silos' answers are validated against its first one.
        while (self.pending and final) or self.crowded or self.asked or self._early:
            if stop_wanted():
                return False
            look()
            if self._roster.online(EVALUATOR) and not self.unusable:
                away = clock.stopwatch()
            needed = self.pending if final else self._early
            hopeless = self.crowded and self.unusable.issuperset(self.pending)
            if hopeless or (needed and (self.unusable or clock.stopwatch() - away > _EVALUATOR_PATIENCE)):
                why = "sent an invalid evaluation" if self.unusable else "stayed away"
                trained = "the model is trained and checkpointed, --resume evaluates it"
                raise RunError(f"the evaluator {why}; {trained if final else '--resume continues'}")
        return True

    def ask(self, name: str) -> bool:
        """Send a silo its evaluation request; returns whether it is online."""
        sequence, version, payloads = self._requests[name]
        header = self._roster.header(name, Kind.EVALUATE, sequence=sequence, base_version=version)
        return bool(self._roster.send(name, Message(header, payloads)))

    def give_up(self, name: str) -> None:
        """Give up a silo that stayed away: its personal model is not evaluated."""
        self._log.note(NoteKind.NOT_MEASURED, peer=name)
        self._close(name, answered=False)

    def _close(self, name: str, *, answered: bool = True) -> None:
        """Close a silo's request, and remember it to recognise a repeated answer, e.g. after a lost connection."""
        sequence, version, _ = self._requests.pop(name)
        self._over[name, sequence, version] = answered

    def _owed(self, header: Header) -> bool:
        """Whether a message answers a silo's open request; a repeated task reply has another base version."""
        request = self._requests.get(header.sender)
        return request is not None and (header.reply_to, header.base_version) == request[:2]

    def measured(self, message: Message) -> bool:
        """Handle a silo's answer about its personal model, or its error; returns whether the message was one."""
        header = message.header
        over = None if header.reply_to is None else (header.sender, header.reply_to, header.base_version)
        if over in self._over:
            if not self._over[over]:
                detail = f"version {header.base_version}: an evaluation of a personal model after the silo was given up"
                self._roster.refuse(header.sender, RemoteWireError("unexpected", detail), 0)
            return True
        if not self._owed(header):
            return False
        name, payload = message.header.sender, message.payloads[0] if message.payloads else None
        if isinstance(payload, Error):
            self._log.note(NoteKind.ERROR_REPORTED, peer=name, error=payload.text[:300])
        elif self._like is None:  # the evaluator has not answered yet
            self._early[name] = payload
        else:
            self._judge(name, payload, self._like)
        self._close(name)
        return True

    def _judge(self, name: str, payload: Payload | None, like: Metrics) -> None:
        """Validate a silo's answer, and keep or refuse it."""
        if (fault := _invalid(payload, name, like)) is not None:
            self._roster.refuse(name, RemoteWireError("unexpected", fault), 0)
        elif isinstance(payload, Metrics):
            self.personal[name] = payload

    def unreadable(self, header: Header) -> bool:
        """Handle an unreadable answer, which is not requested again; returns whether it answers such a request."""
        if header.kind not in (Kind.REPLY, Kind.ERROR):
            return False
        if header.sender == EVALUATOR and header.base_version in self.pending:
            self.unusable.add(header.base_version)
        elif self._owed(header):
            self._close(header.sender)
        else:
            return False
        return True


def personal_figures(version: int, measured: Mapping[str, Metrics]) -> PersonalLine:
    """Metrics of the personal models on the whole split and on each silo's part of it, and their means over silos.

    Args:
        version: version of the shared model.
        measured: metrics by silo; at least one.
    """
    personal = dict(sorted(measured.items()))
    whole = {silo: dict(own.values) for silo, own in personal.items()}
    shares = {silo: dict(own.per_silo.get(silo, {})) for silo, own in personal.items()}
    return PersonalLine(
        kind="personal",
        version=version,
        personal=means(whole),
        personal_whole_split=whole,
        personal_per_silo=shares,
        personal_per_silo_mean=means(shares),
        personal_fairness=fairness_of(shares),
    )
