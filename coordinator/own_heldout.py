"""Evaluation of the shared model by silos on their own held-out items, with ``partition.kind own``.

Silos report metrics and numbers of items only. An evaluation is complete when every silo with held-out pairs has
answered or has been given up; its means weight each silo by its number of items.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from coordinator.peers import Peers
from coordinator.run_context import RunContext
from coordinator.updates import text_of
from fedmq.clock import Clock
from fedmq.errors import RemoteWireError
from fedmq.evaluation.metrics import Metric, objection
from fedmq.evaluation.recall import HEADLINE, fairness_of, means, weighted_means
from fedmq.federation.protocol import State
from fedmq.runs.results import append_metrics
from fedmq.runs.run_records import OwnHeldOutLine, OwnSiloFigures
from fedmq.runs.status import ERROR_CHARACTERS
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import Header, Kind, Message
from fedmq.wire.payloads import Error, Payload, Refusal, SiloMetrics

#: What a silo's policy names when it withholds an evaluation.
_OWN = (SiloMetrics.KIND, Kind.SILO_RESULT.value)


def own_heldout_line(
    version: int, answers: Mapping[str, SiloMetrics], missing: Mapping[str, str] | None = None
) -> OwnHeldOutLine:
    """The line of an evaluation of a version: the silos' answers, of which there may be none, and why others lack."""
    figures = {name: dict(answer.values) for name, answer in answers.items()}
    items = {name: answer.items for name, answer in answers.items()}
    per_silo = {name: OwnSiloFigures.model_validate({"items": items[name], **figures[name]}) for name in figures}
    plain = {
        "kind": "own_heldout",
        "version": version,
        "items": sum(items.values()),
        "metrics": weighted_means(figures, items),
        "per_silo": per_silo,
        "per_silo_mean": means(figures) if figures else {},
        "fairness": fairness_of(figures) if figures else {},
        **({"missing": dict(sorted(missing.items()))} if missing else {}),
    }
    return OwnHeldOutLine.model_validate(plain)


class OwnHeldOutRequests:
    """Requests to silos, and their answers."""

    def __init__(
        self,
        run_context: RunContext,
        roster: Peers,
        log: MessageLog,
        clock: Clock,
        evaluated: Iterable[int],  # versions whose line is in ``metrics.jsonl`` already
        names: Iterable[str],  # metrics that this run may report
        custom: Sequence[Metric],
    ) -> None:
        self._run_context, self._roster, self._log, self._clock = run_context, roster, log, clock
        self._evaluated, self._names, self._custom_metrics = set(evaluated), tuple(names), tuple(custom)
        silos = zip(run_context.context.silos, run_context.pairs, strict=True)
        self._items = {silo.name: count for silo, count in silos if count}
        self._payloads: dict[int, tuple[Payload, ...]] = {}
        self._outstanding: dict[int, set[str]] = {}
        self._answers: dict[int, dict[str, SiloMetrics]] = {}
        self._missing: dict[int, dict[str, str]] = {}
        self._sent: set[tuple[str, int]] = set()
        self.last: OwnHeldOutLine | None = None  # the line of the last complete evaluation

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions whose evaluation is not complete."""
        return tuple(self._outstanding)

    @property
    def outstanding_silos(self) -> frozenset[str]:
        """Silos that have not answered a request."""
        return frozenset().union(*self._outstanding.values())

    @property
    def outstanding(self) -> int:
        """Number of answers that silos owe."""
        return sum(map(len, self._outstanding.values()))

    def request(self, version: int, state: State) -> None:
        """Request the evaluation of a version from all silos with held-out pairs, unless it is done or pending."""
        if version in self._outstanding or version in self._evaluated:
            return
        self._outstanding[version] = set(self._items)
        self._answers[version], self._missing[version] = {}, {}
        more = self._run_context.protocol.release(state)
        model = state.model(self._run_context.context.layout)
        self._payloads[version] = self._run_context.to_silos((model, *more))
        for name in self._items:
            self.send(name)
        self._close_if_complete(version)

    def send(self, name: str, *, again: bool = False) -> None:
        """Send a silo the requests that it has not answered, ``again`` also those of an earlier session."""
        for version, silos in self._outstanding.items():
            if name in silos and (again or (name, version) not in self._sent):
                header = self._roster.header(name, Kind.EVALUATE_SILO, sequence=version, base_version=version)
                if self._roster.send(name, Message(header, self._payloads[version])):
                    self._sent.add((name, version))

    def take(self, message: Message) -> bool:
        """Handle a silo's answer; returns whether the message was one."""
        header = message.header
        answer = message.payloads[0] if len(message.payloads) == 1 else None
        withheld = isinstance(answer, Refusal) and answer.withheld in _OWN
        if header.kind is not Kind.SILO_RESULT and not withheld:
            return False
        name, version = header.sender, header.base_version
        if name not in self._outstanding.get(version, ()):
            return True  # a repeated answer, or one after the silo was given up
        if isinstance(answer, Error | Refusal):
            text = text_of(message)[:ERROR_CHARACTERS]
            self._log.note(LogEvent.ERROR_REPORTED, peer=name, error=text)
            self._missing[version][name] = text
        elif isinstance(answer, SiloMetrics) and (wrong := self._wrong(name, answer)) is None:
            self._answers[version][name] = answer
        else:
            wrong = self._wrong(name, answer) if isinstance(answer, SiloMetrics) else "no metrics"
            self._missing[version][name] = f"refused: {wrong}"
            self._roster.refuse(name, RemoteWireError("unexpected", f"an evaluation with {wrong}"), 0)
        self._outstanding[version].discard(name)
        self._close_if_complete(version)
        return True

    def _wrong(self, name: str, answer: SiloMetrics) -> str | None:
        """Why a silo's answer is refused; None if it is valid."""
        if answer.items != self._items[name]:
            return f"{answer.items} items, the silo stated {self._items[name]}"
        if HEADLINE not in answer.values:
            return f"no {HEADLINE}"
        return objection(answer.values, self._custom_metrics, self._names)

    def able(self, name: str) -> bool:
        """Whether a silo has held-out items with both modalities."""
        return name in self._items

    def unreadable(self, header: Header) -> bool:
        """Handle an unreadable answer, which is not requested again; returns whether it was one."""
        name, version = header.sender, header.base_version
        if header.kind is not Kind.SILO_RESULT:
            return False
        if name in self._outstanding.get(version, ()):
            self._missing[version][name] = "refused: its evaluation could not be read"
            self._outstanding[version].discard(name)
            self._close_if_complete(version)
        return True

    def give_up(self, name: str) -> None:
        """Complete the evaluations without a silo that stays away."""
        for version in [version for version, silos in self._outstanding.items() if name in silos]:
            self._log.note(LogEvent.NOT_MEASURED, peer=name)
            self._missing[version][name] = "it stayed away"
            self._outstanding[version].discard(name)
            self._close_if_complete(version)

    def _close_if_complete(self, version: int) -> None:
        """Write the line of an evaluation once all silos have answered."""
        if self._outstanding[version]:
            return
        answers = {name: self._answers[version][name] for name in self._items if name in self._answers[version]}
        line = own_heldout_line(version, answers, self._missing[version])
        append_metrics(self._run_context.folder, line, self._clock)
        if self.last is None or self.last.version <= version:
            self.last = line
        self._evaluated.add(version)
        self._sent = {each for each in self._sent if each[1] != version}
        for part in (self._outstanding, self._answers, self._missing, self._payloads):
            del part[version]
