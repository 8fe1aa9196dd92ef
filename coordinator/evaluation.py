"""Evaluation requests: to the evaluator for the shared model, and to the silos for their personal models.

Silos evaluate their personal models at the end of the run and, with ``evaluation.personal_every``, during it. The
checkpoint of a merge waits for that evaluation, so that a resumed run has each line exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from coordinator.peers import Peers
from coordinator.run_context import RunContext
from fedmq.clock import Clock
from fedmq.errors import RemoteWireError, RunError
from fedmq.evaluation.fairness import fairness_of, means
from fedmq.evaluation.metrics import HEADLINE, Metric, known_names, objection
from fedmq.evaluation.user_metrics import measures_of, own_metrics
from fedmq.federation.protocol import State
from fedmq.runs.results import read_metrics
from fedmq.runs.run_records import EvaluationLine, PersonalLine
from fedmq.storage.run_folder import append_line
from fedmq.wire.log_records import NoteKind
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import EVALUATOR, Error, Header, Kind, Message, Metrics, Payload

#: Largest number of pending evaluations during the rounds: each keeps a model in memory.
UNDER_WAY = 8
#: Real time [s] to wait for a disconnected evaluator if nothing else is left to do.
_EVALUATOR_PATIENCE = 60.0


def _wrong_evaluation(
    payload: Payload | None, silos: Iterable[str], names: Iterable[str], own: Sequence[Metric]
) -> str | None:
    """What is wrong with the evaluator's evaluation of the shared model; None if it is valid.

    Args:
        payload: the evaluator's answer.
        silos: of the run; the answer must have metrics for each.
        names: of the metrics that this run may measure.
        own: entries of user-defined metrics.
    """
    if not isinstance(payload, Metrics):
        return "no measurement"
    if HEADLINE not in payload.values or any(HEADLINE not in payload.per_silo.get(name, {}) for name in silos):
        return f"an evaluation without {HEADLINE} of the whole and of every silo"
    wrong = (objection(values, own, names) for values in (payload.values, *payload.per_silo.values()))
    return next((f"an evaluation with {each}" for each in wrong if each is not None), None)


def _wrong(payload: Payload | None, name: str, like: Metrics, own: Sequence[Metric]) -> str | None:
    """What is wrong with a silo's evaluation of its personal model; None if it is valid.

    The summary averages metrics that all silos have, so one silo's missing metric would be missing for all.

    Args:
        payload: the silo's answer.
        name: of the silo.
        like: an evaluation of the shared model, which has the same metrics as a silo's evaluation.
        own: entries of user-defined metrics.
    """
    if not isinstance(payload, Metrics):
        return "no measurement"
    if payload.per_silo.keys() != {name}:
        return "a measurement without its own share, or with another's"
    for found, wanted in ((payload.values, like.values), (payload.per_silo[name], like.per_silo[name])):
        if found.keys() != wanted.keys():
            odd = ", ".join(sorted(found.keys() ^ wanted.keys())[:3])
            return f"a measurement with other figures than an evaluation has: {odd}"
        if (wrong := objection(found, own)) is not None:
            return f"a measurement with {wrong}"
    return None


class EvaluationRequests:
    """Pending evaluation requests and their results.

    Args:
        run_context: of the run.
        roster: sends the requests.
        log: the coordinator's message log.
        evaluated: versions whose evaluation is in ``metrics.jsonl`` already.

    Attributes:
        pending: versions that the evaluator has not answered for.
        unusable: those of them whose answer was refused.
        metrics: of the last version evaluated.
        asked: silos that have not answered for their personal models.
        personal: last answer of each silo.
        missing: why the last evaluation of a silo's personal model failed, by silo.

    Raises:
        InputError: a user-defined metric cannot be loaded.
    """

    def __init__(self, run_context: RunContext, roster: Peers, log: MessageLog, evaluated: Iterable[int]) -> None:
        self._run_context, self._roster, self._log = run_context, roster, log
        self._evaluated = set(evaluated)
        self._requests: dict[str, tuple[int, int, tuple[Payload, ...]]] = {}
        self._over: dict[tuple[str, int, int], bool] = {}  # whether a closed request was answered, not given up
        self.pending: list[int] = []
        self.unusable: set[int] = set()
        self.metrics: Mapping[str, float] = {}
        self.personal: dict[str, Metrics] = {}
        self.missing: dict[str, str] = {}
        measures = measures_of(run_context.scenario.evaluation)
        self._names = known_names(run_context.scenario.evaluation, measures)
        self._own_metrics, self._refusal = own_metrics(measures), ""
        self._like: Metrics | None = None
        self._early: dict[str, tuple[int, Payload | None]] = {}

    @property
    def crowded(self) -> bool:
        """Whether the evaluator is so far behind that the run waits for it."""
        return len(self.pending) > UNDER_WAY

    @property
    def asked(self) -> tuple[str, ...]:
        """Silos that have not answered for their personal models."""
        return tuple(self._requests)

    def evaluate_if_due(self, version: int, state: State) -> None:
        """Request the evaluation of a version, if it is due and has not been requested before."""
        every, last = self._run_context.scenario.evaluation.every, self._run_context.scenario.rounds
        if version in self.pending or version in self._evaluated:
            return
        if version in (0, last) or (every and version % every == 0):
            self.pending.append(version)
            self.evaluate(version, state)

    def evaluate(self, version: int, state: State) -> None:
        """Send, or resend, the request to evaluate a version."""
        more = self._run_context.protocol.release(state)
        header = self._roster.header(EVALUATOR, Kind.EVALUATE, sequence=version, base_version=version)
        model = state.model(self._run_context.context.layout)
        self._roster.send(EVALUATOR, Message(header, (model, *more)))

    def evaluated(self, message: Message) -> None:
        """Handle the evaluator's answer: check it and write it to ``metrics.jsonl``."""
        version, payload = message.header.base_version, message.payloads[0] if message.payloads else None
        if version not in self.pending:
            return
        silos = [silo.name for silo in self._run_context.context.silos]
        wrong = _wrong_evaluation(payload, silos, self._names, self._own_metrics)
        if wrong is not None or not isinstance(payload, Metrics):
            self._refusal = f"version {version}: {wrong}"
            self._roster.refuse(EVALUATOR, RemoteWireError("unexpected", self._refusal), 0)
            self.unusable.add(version)
            return
        self.pending.remove(version)
        self.unusable.discard(version)
        self._evaluated.add(version)
        self.metrics = dict(payload.values)
        per_silo = {name: dict(values) for name, values in payload.per_silo.items()}
        line = EvaluationLine(kind="evaluation", version=version, metrics=dict(self.metrics), per_silo=per_silo)
        append_line(self._run_context.folder.metrics, line.plain())
        self._like = payload
        for name in list(self._early):
            self._accept(name, *self._early.pop(name), payload)

    def ask_silos(self, gone: Container[str], version: int, state: State, settled: Mapping[str, int]) -> None:
        """Prepare requests to the silos of a personalised method to evaluate their personal models locally.

        Args:
            gone: silos that were given up, which get no request.
            version: of the model they get.
            state: of that version.
            settled: number of each silo's last task whose outcome is known; it evaluates its state after that task.
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
        """Whether personal models are to be evaluated at this version; the last version is evaluated in any case."""
        every = self._run_context.scenario.evaluation.personal_every
        if not every or version % every or version >= self._run_context.scenario.rounds:
            return False
        return self._run_context.traits.personalised

    def put_on_file(self, version: int) -> None:
        """Write the line of the personal models at a version, if the scenario requests such lines."""
        if self._run_context.scenario.evaluation.personal_every and self.personal:
            append_line(self._run_context.folder.metrics, personal_figures(version, self.personal).plain())

    def wait(self, look: Callable[[], None], stop_wanted: Callable[[], bool], clock: Clock, *, final: bool) -> bool:
        """Wait until all silos in :attr:`asked` have answered or are given up; if :attr:`crowded` or ``final``, also
        for the evaluator.

        Args:
            look: handles arriving messages and gives up offline silos; waits a fraction of a second if nothing arrives.
            stop_wanted: true ends the waiting.
            clock: of the run.
            final: only evaluations are left to do in the run.

        Returns:
            True when all answers are there; False if a stop is wanted.

        Raises:
            RunError: the evaluator stays offline, or its answer is unusable.
        """
        away = clock.stopwatch()
        # During the run the evaluator may be late, even to join. Answers of silos wait in _early for its first answer,
        # against which they are checked.
        while (self.pending and final) or self.crowded or self.asked or self._early:
            if stop_wanted():
                return False
            look()
            if self._roster.online(EVALUATOR) and not self.unusable:
                away = clock.stopwatch()
            needed = self.pending if final else self._early
            hopeless = self.crowded and self.unusable.issuperset(self.pending)
            if hopeless or (needed and (self.unusable or clock.stopwatch() - away > _EVALUATOR_PATIENCE)):
                why = "sent an unusable answer" if self.unusable else "stayed offline"
                trained = "the trained model is in the checkpoint, --resume evaluates it"
                refused = f" ({self._refusal})" if self.unusable and self._refusal else ""
                raise RunError(f"the evaluator {why}; {trained if final else '--resume continues the run'}{refused}")
        return True

    def ask(self, name: str) -> bool:
        """Send a silo its request; returns whether the silo is online."""
        sequence, version, payloads = self._requests[name]
        header = self._roster.header(name, Kind.EVALUATE, sequence=sequence, base_version=version)
        return bool(self._roster.send(name, Message(header, payloads)))

    def give_up(self, name: str) -> None:
        """Give up on a silo that stayed offline: its personal model is not evaluated."""
        self._log.note(NoteKind.NOT_MEASURED, peer=name)
        self._record_missing(name, self._requests[name][1], "it stayed away")
        self._close(name, answered=False)

    def _close(self, name: str, *, answered: bool = True) -> None:
        """Close a silo's request; a resent answer to it is then not mistaken for a reply to a task."""
        sequence, version, _ = self._requests.pop(name)
        self._over[name, sequence, version] = answered

    def _answers_request(self, header: Header) -> bool:
        """Whether a message answers a silo's request; a resent reply to its last task differs in the version only."""
        request = self._requests.get(header.sender)
        return request is not None and (header.reply_to, header.base_version) == request[:2]

    def measured(self, message: Message) -> bool:
        """Handle a silo's evaluation of its personal model, or its error; returns whether the message was either."""
        header = message.header
        over = None if header.reply_to is None else (header.sender, header.reply_to, header.base_version)
        if over in self._over:
            if not self._over[over]:
                detail = f"version {header.base_version}: a measurement of its own model after it was given up"
                self._roster.refuse(header.sender, RemoteWireError("unexpected", detail), 0)
            return True
        if not self._answers_request(header):
            return False
        name, version = header.sender, header.base_version
        payload = message.payloads[0] if message.payloads else None
        if isinstance(payload, Error):
            self._log.note(NoteKind.ERROR_REPORTED, peer=name, error=payload.text[:300])
            self._record_missing(name, version, payload.text[:300])
        elif self._like is None:  # the evaluator has not sent its first evaluation yet
            self._early[name] = version, payload
        else:
            self._accept(name, version, payload, self._like)
        self._close(name)
        return True

    def _record_missing(self, name: str, version: int, why: str) -> None:
        """Record why a silo's personal model was not evaluated at a version, for the summary."""
        self.missing[name] = f"version {version}: {why}"

    def _accept(self, name: str, version: int, payload: Payload | None, like: Metrics) -> None:
        """Accept a silo's evaluation, or refuse it."""
        if (wrong := _wrong(payload, name, like, self._own_metrics)) is not None:
            self._record_missing(name, version, f"refused: {wrong}")
            self._roster.refuse(name, RemoteWireError("unexpected", wrong), 0)
        elif isinstance(payload, Metrics):
            self.personal[name] = payload

    def unreadable(self, header: Header) -> bool:
        """Handle an undecodable message, which would not change if resent; returns whether it answered a request."""
        if header.kind not in (Kind.REPLY, Kind.ERROR):
            return False
        if header.sender == EVALUATOR and header.base_version in self.pending:
            self.unusable.add(header.base_version)
        elif self._answers_request(header):
            self._record_missing(header.sender, header.base_version, "refused: its measurement could not be read")
            self._close(header.sender)
        else:
            return False
        return True


def personal_figures(version: int, measured: Mapping[str, Metrics]) -> PersonalLine:
    """Metrics of the personal models on the whole split and on each silo's part of it, and the means of both.

    Args:
        version: of the shared model at that time.
        measured: evaluation of each silo, by name; at least one.
    """
    personal = dict(sorted(measured.items()))
    whole = {silo: dict(metrics.values) for silo, metrics in personal.items()}
    local = {silo: dict(metrics.per_silo.get(silo, {})) for silo, metrics in personal.items()}
    return PersonalLine(
        kind="personal",
        version=version,
        personal=means(whole),
        personal_whole_split=whole,
        personal_per_silo=local,
        personal_per_silo_mean=means(local),
        personal_fairness=fairness_of(local),
    )
