"""Evaluation requests: to the evaluator for the global model, and to silos for their personal models.

Silos evaluate at the end, and during the run as configured by ``evaluation.personal_every``. The checkpoint of a merge
waits for them, so that a resumed run has every line exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from coordinator.liveness import AnswerLimit
from coordinator.own_heldout import OwnHeldOutRequests
from coordinator.peers import Peers
from coordinator.release import BestModel, patience_over
from coordinator.run_context import RunContext
from coordinator.updates import text_of
from fedmq.clock import Clock
from fedmq.errors import RemoteWireError, RunError
from fedmq.evaluation.custom_metrics import custom_metrics, measures_of
from fedmq.evaluation.metrics import Metric, is_known, known_names, objection
from fedmq.evaluation.recall import HEADLINE, fairness_of, means
from fedmq.federation.protocol import State
from fedmq.runs.results import append_metrics, read_metrics
from fedmq.runs.run_records import EvaluationLine, OwnHeldOutLine, PersonalLine
from fedmq.runs.status import ERROR_CHARACTERS
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import EVALUATOR, Header, Kind, Message
from fedmq.wire.payloads import Error, Metrics, Payload, Refusal

#: Maximum number of pending evaluations while rounds continue: each keeps a model in memory and one in transit.
UNDER_WAY = 8
#: Real time to wait for a lost evaluator when the run depends on it [s].
_EVALUATOR_PATIENCE = 60.0


def _wrong_evaluation(
    answer: Payload | None, silos: Iterable[str], names: Iterable[str], custom: Sequence[Metric]
) -> str | None:
    """Why the evaluator's evaluation, which must cover ``silos``, is refused; None if it is valid."""
    if not isinstance(answer, Metrics):
        return "no evaluation"
    if HEADLINE not in answer.values or any(HEADLINE not in answer.per_silo.get(name, {}) for name in silos):
        return f"an evaluation without {HEADLINE} of the whole split and of every silo"
    wrong = (objection(values, custom, names) for values in (answer.values, *answer.per_silo.values()))
    return next((f"an evaluation with {each}" for each in wrong if each is not None), None)


def _wrong_own_personal(
    answer: Payload | None, name: str, names: Iterable[str], custom: Sequence[Metric]
) -> str | None:
    """Why a silo's evaluation of its personal model on its own held-out items is refused; None if it is valid."""
    if not isinstance(answer, Metrics) or answer.values or answer.per_silo.keys() != {name}:
        return "metrics other than those of the silo's own held-out items"
    if HEADLINE not in (found := answer.per_silo[name]):
        return f"an evaluation without {HEADLINE}"
    return None if (wrong := objection(found, custom, names)) is None else f"an evaluation with {wrong}"


def _wrong_personal(answer: Payload | None, name: str, like: Metrics, custom: Sequence[Metric]) -> str | None:
    """Why a silo's evaluation of its personal model is refused; None if it is valid.

    It needs the metrics of ``like``, the evaluator's: summaries are means and spreads over silos of metrics that all
    silos have, so one silo's names or values affect all.
    """
    if not isinstance(answer, Metrics):
        return "no evaluation"
    if answer.per_silo.keys() != {name}:
        return "an evaluation of other parts of the split than the silo's own"
    for found, wanted in ((answer.values, like.values), (answer.per_silo[name], like.per_silo[name])):
        # A user-defined metric may have no value for one of the models.
        if odd_names := sorted(filter(is_known, found.keys() ^ wanted.keys())):
            odd = ", ".join(odd_names[:3])
            return f"an evaluation with other metrics than the evaluator's: {odd}"
        if (wrong := objection(found, custom)) is not None:
            return f"an evaluation with {wrong}"
    return None


class EvaluationRequests:
    """Evaluation requests of a run and their answers; versions ``evaluated`` are in ``metrics.jsonl`` already."""

    def __init__(
        self, run_context: RunContext, roster: Peers, log: MessageLog, clock: Clock, evaluated: Iterable[int]
    ) -> None:
        self._run_context, self._roster, self._log, self._clock = run_context, roster, log, clock
        self.limit = AnswerLimit(run_context.scenario.aggregation.task_limit)
        self.given_up: set[int] = set()
        self._evaluated = set(evaluated)
        self._requests: dict[str, tuple[int, int, tuple[Payload, ...]]] = {}
        self._over: dict[tuple[str, int, int], bool] = {}  # True: answered; False: given up
        self.pending: list[int] = []
        self.unusable: set[int] = set()
        self.metrics: Mapping[str, float] = {}
        self.metrics_version: int | None = None
        self.personal: dict[str, Metrics] = {}
        self.missing: dict[str, str] = {}
        self.best: BestModel | None = None
        measures = measures_of(run_context.scenario.evaluation)
        self._names = known_names(run_context.scenario.evaluation, measures)
        self._custom_metrics, self._refusal = custom_metrics(measures), ""
        done = [line.version for line in read_metrics(run_context.folder) if isinstance(line, OwnHeldOutLine)]
        self.own = OwnHeldOutRequests(run_context, roster, log, clock, done, self._names, self._custom_metrics)
        self._like: Metrics | None = None
        self._early: dict[str, tuple[int, Payload | None]] = {}

    @property
    def crowded(self) -> bool:
        """Whether the number of pending evaluations has reached the limit at which the run waits for them."""
        return len(self.pending) > UNDER_WAY or len(self.own.versions) > UNDER_WAY

    @property
    def decides(self) -> bool:
        """Whether the rounds wait for each evaluation, because it may end the run."""
        return self._run_context.scenario.evaluation.patience is not None

    def ends_after(self, version: int) -> bool:
        """Whether the run is to end after a version, because evaluations no longer improve."""
        patience = self._run_context.scenario.evaluation.patience
        if patience is None or version not in self._evaluated:
            return False
        return patience_over(read_metrics(self._run_context.folder), patience)

    @property
    def requested(self) -> tuple[str, ...]:
        """Silos that have not answered an evaluation request for their personal models or on their held-out items."""
        return tuple(dict.fromkeys((*self._requests, *sorted(self.own.outstanding_silos))))

    @property
    def outstanding(self) -> int:
        """Number of answers that silos owe."""
        return len(self._requests) + self.own.outstanding

    @property
    def evaluators(self) -> tuple[str, ...]:
        """The evaluator, if the run has one."""
        return (EVALUATOR,) if self._run_context.scenario.evaluator else ()

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions whose evaluation is pending."""
        return *self.pending, *self.own.versions

    def evaluate_if_due(self, version: int, state: State) -> None:
        """Request the evaluation of a version if it is configured and not requested or done yet."""
        scenario = self._run_context.scenario
        if not self._is_due(version):
            return
        if scenario.silos_evaluate:
            self.own.request(version, state)
        if scenario.evaluator and version not in self.pending and version not in self._evaluated:
            if self.limit.exceeded and version < scenario.rounds:
                return  # requests that it does not read would fill its queue
            self.pending.append(version)
            self.evaluate(version, state)

    def _is_due(self, version: int) -> bool:
        return self._run_context.scenario.evaluation.due(version, self._run_context.scenario.rounds)

    def unevaluated(self, version: int) -> tuple[int, ...]:
        """Versions up to this one that the evaluator was to evaluate and did not."""
        if not self._run_context.scenario.evaluator:
            return ()
        return tuple(each for each in range(version + 1) if self._is_due(each) and each not in self._evaluated)

    def evaluate(self, version: int, state: State) -> None:
        """Send or resend an evaluation request to the evaluator."""
        more = self._run_context.protocol.release(state)
        header = self._roster.header(EVALUATOR, Kind.EVALUATE, sequence=version, base_version=version)
        model = state.model(self._run_context.context.layout)
        self._roster.send(EVALUATOR, Message(header, (model, *more)))
        self.limit.requested(self._clock.stopwatch())

    def rejoined(self, states: Mapping[int, State]) -> None:
        """Send the pending requests to an evaluator that has connected again; its time counts from now."""
        for version in self.pending:
            self.evaluate(version, states[version])
        self.limit.connected(self._clock.stopwatch())

    def evaluated(self, message: Message, states: Mapping[int, State]) -> None:
        """Validate the evaluator's answer, append it to ``metrics.jsonl``, and keep the version if it is the best."""
        version, payload = message.header.base_version, message.payloads[0] if message.payloads else None
        if version not in self.pending and version not in self.given_up:
            return
        # An evaluator with its own held-out set does not know which of its items would belong to a silo.
        shared = self._run_context.scenario.data is not None
        silos = [silo.name for silo in self._run_context.context.silos if shared and self._has_pairs(silo.name)]
        wrong = _wrong_evaluation(payload, silos, self._names, self._custom_metrics)
        if wrong is not None or not isinstance(payload, Metrics):
            self._refusal = f"version {version}: {wrong}"
            self._roster.refuse(EVALUATOR, RemoteWireError("unexpected", self._refusal), 0)
            self.unusable.add(version)
            return
        if version in self.pending:
            self.pending.remove(version)
        self.unusable.discard(version)
        self.given_up.discard(version)
        self.limit.answered(self._clock.stopwatch(), more=bool(self.pending))
        self._evaluated.add(version)
        if self.metrics_version is None or version > self.metrics_version:  # an answer may be late
            self.metrics, self.metrics_version = dict(payload.values), version
        per_silo = {name: dict(own) for name, own in payload.per_silo.items()}
        line = EvaluationLine(kind="evaluation", version=version, metrics=dict(payload.values), per_silo=per_silo)
        append_metrics(self._run_context.folder, line, self._clock)
        self._like = payload
        for name in list(self._early):
            self._judge(name, *self._early.pop(name), payload)
        if self.best is not None and version in states:
            self.best.evaluated(version, payload, states[version])

    def ask_silos(self, gone: Container[str], version: int, state: State, committed: Mapping[str, int]) -> None:
        """Prepare requests to the silos of a personalised method, but those ``gone``, to evaluate their personal
        models.

        A silo evaluates its state after its task ``committed``.
        """
        self.personal = {}
        if self._run_context.traits.personalised:
            before = [line for line in read_metrics(self._run_context.folder) if isinstance(line, EvaluationLine)]
            if before:
                self._like = Metrics(before[-1].metrics, before[-1].per_silo)
            shared = self._run_context.scenario.data is not None
            able = self._has_pairs if shared else self.own.able
            for name in sorted(name for name in self._run_context.plan.eligible if able(name) and name not in gone):
                payloads = self._run_context.task(state, self._run_context.facts_at(name, version))
                self._requests[name] = committed.get(name, 0), version, payloads

    def _has_pairs(self, name: str) -> bool:
        """Whether a silo has items of the evaluated split with both modalities, in a simulated partition."""
        silos = zip(self._run_context.context.silos, self._run_context.pairs, strict=False)
        return all(count > 0 for silo, count in silos if silo.name == name)

    def personal_due(self, version: int) -> bool:
        """Whether the silos evaluate their personal models at this version; the final version is not covered here."""
        every = self._run_context.scenario.evaluation.personal_every
        if not every or version % every or version >= self._run_context.scenario.rounds:
            return False
        return self._run_context.traits.personalised

    def record_saved(self, version: int) -> None:
        """Append the line of the personal models at a version to ``metrics.jsonl``, if configured."""
        if self._run_context.scenario.evaluation.personal_every and self.personal:
            append_metrics(self._run_context.folder, personal_figures(version, self.personal), self._clock)

    def _give_up_evaluator(self) -> None:
        """Stop waiting for the evaluator; silos' evaluations that are judged against its own are not kept."""
        self._log.note(LogEvent.EVALUATOR_ABSENT, peer=EVALUATOR, versions=", ".join(map(str, self.pending)))
        self.given_up.update(self.pending)
        self.pending.clear()
        for name, (version, _) in sorted(self._early.items()):
            self._lacks(name, version, "the evaluator did not answer")
        self._early.clear()

    def wait(self, look: Callable[[], None], stop_wanted: Callable[[], bool], *, final: bool) -> bool:
        """Wait until the silos have answered or are given up; if :attr:`crowded` or final, also for the evaluator.

        A connected evaluator that does not answer within its limit is given up; the run continues without it. ``look``
        receives messages and gives up absent silos. Returns whether all answers arrived; false if a stop was requested.

        Raises:
            RunError: the evaluator stays away, or its answer is unusable.
        """
        clock = self._clock
        away = clock.stopwatch()
        silos, unanswered = AnswerLimit(self._run_context.scenario.aggregation.task_limit), len(self.requested)
        silos.requested(away)
        # During the run the evaluator may be late; silos' answers are validated against its first one.
        waits = final or self.decides
        while (self.pending and waits) or self.crowded or self._requests or self._early or (final and self.requested):
            if stop_wanted():
                return False
            look()
            if len(self.requested) != unanswered:
                unanswered = len(self.requested)
                silos.answered(clock.stopwatch(), more=True)
            if silos.exceed(clock.stopwatch()):
                for name in filter(self._roster.online, self.requested):
                    self.give_up(name, "it did not answer within the limit")
            if not self._roster.online(EVALUATOR):
                self.limit.disconnected(clock.stopwatch())
            elif not self.unusable:
                away = clock.stopwatch()
                if (self.pending or self._early) and self.limit.exceed(away):
                    self._give_up_evaluator()
            needed = self.pending if waits else self._early
            hopeless = len(self.pending) > UNDER_WAY and self.unusable.issuperset(self.pending)
            if hopeless or (needed and (self.unusable or clock.stopwatch() - away > _EVALUATOR_PATIENCE)):
                why = "sent an invalid evaluation" if self.unusable else "stayed away"
                trained = "the model is trained and checkpointed, --resume evaluates it"
                refused = f" ({self._refusal})" if self.unusable and self._refusal else ""
                raise RunError(f"the evaluator {why}; {trained if final else '--resume continues'}{refused}")
        return True

    def ask(self, name: str, *, again: bool = False) -> bool:
        """Send a silo its requests, ``again`` also those of an earlier session; returns whether it is online."""
        self.own.send(name, again=again)
        if name not in self._requests:
            return self._roster.online(name)
        sequence, version, payloads = self._requests[name]
        header = self._roster.header(name, Kind.EVALUATE, sequence=sequence, base_version=version)
        return bool(self._roster.send(name, Message(header, payloads)))

    def give_up(self, name: str, why: str = "it stayed away") -> None:
        """Give up a silo that stayed away: it evaluates neither its personal model nor the shared one."""
        self.own.give_up(name)
        if name not in self._requests:
            return
        self._log.note(LogEvent.NOT_MEASURED, peer=name)
        self._lacks(name, self._requests[name][1], why)
        self._close(name, answered=False)

    def _close(self, name: str, *, answered: bool = True) -> None:
        """Close a silo's request, and remember it to recognise a repeated answer, e.g. after a lost connection."""
        sequence, version, _ = self._requests.pop(name)
        self._over[name, sequence, version] = answered

    def _is_outstanding(self, header: Header) -> bool:
        """Whether a message answers a silo's open request; a repeated task reply has another base version."""
        request = self._requests.get(header.sender)
        return request is not None and (header.reply_to, header.base_version) == request[:2]

    def requested_of(self, header: Header) -> bool:
        """Whether a silo's reply answers a request of its personal model's evaluation, open or closed."""
        return self._is_outstanding(header) or (header.sender, header.reply_to, header.base_version) in self._over

    def measured(self, message: Message) -> bool:
        """Handle a silo's answer to an evaluation request, or its error; returns whether the message was one."""
        header = message.header
        if self.own.take(message):
            return True
        over = None if header.reply_to is None else (header.sender, header.reply_to, header.base_version)
        if over in self._over:
            if not self._over[over]:
                detail = f"version {header.base_version}: an evaluation of a personal model after the silo was given up"
                self._roster.refuse(header.sender, RemoteWireError("unexpected", detail), 0)
            return True
        if not self._is_outstanding(header):
            return False
        name, version = header.sender, header.base_version
        payload = message.payloads[0] if message.payloads else None
        if isinstance(payload, Error | Refusal):
            text = text_of(message)[:ERROR_CHARACTERS]
            self._log.note(LogEvent.ERROR_REPORTED, peer=name, error=text)
            self._lacks(name, version, text)
        elif self._run_context.scenario.data is None:
            wrong = _wrong_own_personal(payload, name, self._names, self._custom_metrics)
            self._keep(name, version, payload, wrong)
        elif self._like is None:  # the evaluator has not answered yet
            self._early[name] = version, payload
        else:
            self._judge(name, version, payload, self._like)
        self._close(name)
        return True

    def _lacks(self, name: str, version: int, why: str) -> None:
        """Record why a silo's personal model was not evaluated at a version, for the end of the run."""
        self.missing[name] = f"version {version}: {why}"

    def _judge(self, name: str, version: int, answer: Payload | None, like: Metrics) -> None:
        """Validate a silo's answer, and keep or refuse it."""
        self._keep(name, version, answer, _wrong_personal(answer, name, like, self._custom_metrics))

    def _keep(self, name: str, version: int, answer: Payload | None, wrong: str | None) -> None:
        """Keep a silo's answer, or refuse it for what is wrong with it."""
        if wrong is not None:
            self._lacks(name, version, f"refused: {wrong}")
            self._roster.refuse(name, RemoteWireError("unexpected", wrong), 0)
        elif isinstance(answer, Metrics):
            self.personal[name] = answer

    def unreadable(self, header: Header) -> bool:
        """Handle an unreadable answer, which is not requested again; returns whether it answers such a request."""
        if self.own.unreadable(header):
            return True
        if header.kind not in (Kind.REPLY, Kind.ERROR):
            return False
        if header.sender == EVALUATOR and header.base_version in self.pending:
            self.unusable.add(header.base_version)
        elif self._is_outstanding(header):
            self._lacks(header.sender, header.base_version, "refused: its evaluation could not be read")
            self._close(header.sender)
        else:
            return False
        return True


def personal_figures(version: int, measured: Mapping[str, Metrics]) -> PersonalLine:
    """Metrics of at least one personal model on the whole split and on each silo's part of it, and their means."""
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
