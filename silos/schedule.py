"""The schedule that a silo agreed to: what its coordinator may ask, from the scenario and the silo's own log.

A silo answers what the scenario needs and nothing else, whatever the coordinator sends: one task for each version of
the model, at the rate of its round, and the evaluations that the scenario schedules.
"""

from __future__ import annotations

from fedmq.config.resolve import ResolvedRun
from fedmq.errors import RemoteWireError
from fedmq.federation.protocol import Traits
from fedmq.wire.codec import digest
from fedmq.wire.log_records import MessageRecord, read_log
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import COORDINATOR, Header, Kind, Message, Reason
from fedmq.wire.payloads import Model, sizes

#: Evaluations of a version with another model than before that a silo answers in a run: a coordinator that was killed
#: before its checkpoint repeats the merge, on a wall clock of other replies.
_REPEATED_MERGES = 8
_NEW_RUN = "if the run was begun anew, start the silo with another folder (--out)"
_Contents = tuple[tuple[str, int, str], ...]


class AgreedSchedule:
    """What the coordinator may ask of a silo, and what it has asked, by its log also of earlier processes."""

    def __init__(self, run: ResolvedRun, traits: Traits, log: MessageLog) -> None:
        self._scenario, self._traits, self._log = run.scenario, traits, log
        self._tasks: dict[int, tuple[int, _Contents]] = {}
        self._models: dict[tuple[int, int], str] = {}  # of tasks, by version and size, as a method may send a part
        self._evaluated: dict[tuple[Kind, int], set[_Contents]] = {}
        self._repeated = 0
        for _, record in read_log(log.path):
            if isinstance(record, MessageRecord) and record.action == "received" and record.header.run == run.id:
                found = zip(record.payloads, record.digests, strict=False)
                self._take(record.header, tuple((kind, size, content) for (kind, size), content in found))

    def check(self, message: Message) -> None:
        """Check a message of kind task, evaluate or evaluate_silo, which counts from here on.

        Raises:
            RemoteWireError: the scenario has no such request, or another one of this version; the log says so.
        """
        contents = tuple(
            (kind, size, digest(payload))
            for (kind, size), payload in zip(sizes(message.payloads), message.payloads, strict=True)
        )
        wrong = self._outside(message) or self._take(message.header, contents)
        if wrong is not None:
            self._log.refused(COORDINATOR, Reason.UNSCHEDULED, wrong, 0)
            raise RemoteWireError(Reason.UNSCHEDULED, wrong)

    def _outside(self, message: Message) -> str | None:
        """What of a request the scenario does not have; None if it may have it."""
        scenario, header, task = self._scenario, message.header, message.task
        version, rounds = header.base_version, scenario.rounds
        if header.kind is Kind.EVALUATE and not self._traits.personalised:
            return f"an evaluation of a personal model, which {scenario.protocol.label} has none of"
        if header.kind is Kind.EVALUATE_SILO and not (
            scenario.silos_evaluate and scenario.evaluation.due(version, rounds)
        ):
            return f"an evaluation of version {version} on the silo's own items, which the scenario does not schedule"
        if header.kind is Kind.EVALUATE and version > rounds:
            return f"an evaluation of version {version}, but the scenario has {rounds} rounds"
        if task is None or header.kind is not Kind.TASK:
            return None
        if (task.round, task.rounds) != (version, rounds) or version >= rounds:
            said = f"a task of round {task.round} of {task.rounds} with version {version}"
            return f"{said}, but the scenario has {rounds} rounds, each with the version of its number"
        if not 1 <= header.sequence <= version + 1:
            return f"a task with number {header.sequence} in round {version}: a silo has at most one task in each round"
        rate = scenario.training.rate_at(version, scenario.schedule_rounds)
        if task.learning_rate != rate:
            return f"a task with the learning rate {task.learning_rate!r}, but in round {version} it is {rate!r}"
        return None

    def _take(self, header: Header, contents: _Contents) -> str | None:
        """Count a request; returns what earlier ones of its version contradict, None if they agree."""
        version = header.base_version
        models = {(version, size): content for kind, size, content in contents if kind == Model.KIND}
        if header.kind is Kind.TASK:
            if self._tasks.setdefault(version, (header.sequence, contents)) != (header.sequence, contents):
                return f"a second task of round {version} with other content: the silo answers one; {_NEW_RUN}"
            self._models |= models
            return None
        if header.kind not in (Kind.EVALUATE, Kind.EVALUATE_SILO):
            return None
        if not self._traits.model_per_silo and any(self._models.get(at, one) != one for at, one in models.items()):
            return f"an evaluation of another model of version {version} than the silo was sent to train"
        known = self._evaluated.setdefault((header.kind, version), set())
        asked = tuple(each for each in contents if each[0] == Model.KIND)
        if known and asked not in known:
            if self._repeated >= _REPEATED_MERGES:
                return f"an evaluation of another model of version {version} than before"
            self._repeated += 1
        known.add(asked)
        return None
