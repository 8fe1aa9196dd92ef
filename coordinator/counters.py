"""Counters of a run for its summary; checkpoints store them, so that they continue after a resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from fedmq.runs.run_records import UnusableReplies
from fedmq.storage.json_files import Amount, Count, Stored
from fedmq.wire.payloads import Payload, tensor_bytes


class CountersRecord(Stored):
    """The counters as a checkpoint stores them, see :class:`Counters`."""

    up: dict[str, Count]
    down: dict[str, Count]
    sent: Count
    received: Count
    refused: dict[str, Count]
    participations: dict[str, Count]
    discarded: dict[str, Count]
    failed: Count
    failures: dict[str, Count]
    unusable: dict[str, UnusableReplies]
    errors: dict[str, str]
    events: Count
    seconds: dict[str, Amount]
    silo_up: dict[str, Count]
    silo_down: dict[str, Count]


@dataclass
class Counters:
    """Counters of a run.

    Args:
        up: payload tensors [bytes] by kind in all replies that reached the coordinator, merged or not.
        down: payload tensors [bytes] by kind in all tasks sent, including resends.
        silo_up: the same as ``up`` by silo instead of by kind.
        silo_down: the same as ``down`` by silo.
        sent: messages that the coordinator sent.
        received: messages that it received.
        refused: messages that it refused, by reason.
        participations: merged replies, by silo.
        discarded: replies that arrived but were not merged, by reason.
        failed: tasks without a usable reply.
        failures: the same by reason.
        unusable: refused replies and reported errors, by silo.
        errors: task errors reported since the last merge that had a reply, by silo.
        events: timeline events handled, including the present one.
        seconds: real seconds by phase and in total, summed over resumes; until the first round, ``gathering`` is the
            part of ``startup`` before the run's data were known.
    """

    up: Counter[str] = field(default_factory=Counter)
    down: Counter[str] = field(default_factory=Counter)
    silo_up: Counter[str] = field(default_factory=Counter)
    silo_down: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    received: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    participations: Counter[str] = field(default_factory=Counter)
    discarded: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    unusable: dict[str, UnusableReplies] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    events: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Add real seconds to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def add_traffic(self, direction: Literal["up", "down"], silo: str, payloads: Iterable[Payload]) -> None:
        """Count the payload bytes of a silo's message."""
        kinds, silos = (self.up, self.silo_up) if direction == "up" else (self.down, self.silo_down)
        for payload in payloads:
            # Scalars are in the body's header; count each as the eight bytes of a number.
            size = tensor_bytes(payload) or 8
            kinds[payload.KIND] += size
            silos[silo] += size

    def subtract(self, sent: int, received: int, refused: Counter[str]) -> None:
        """Take back messages that will be counted again.

        Args:
            sent: number of messages sent.
            received: number of messages received.
            refused: number of messages refused, by reason.
        """
        self.sent, self.received = self.sent - sent, self.received - received
        self.refused = self.refused - refused

    def to_record(self) -> CountersRecord:
        """The record that a checkpoint stores."""
        plain = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}
        return CountersRecord.model_validate(plain)

    @classmethod
    def from_record(cls, record: CountersRecord) -> Counters:
        """The inverse of :meth:`to_record`."""
        return cls(
            up=Counter(record.up),
            down=Counter(record.down),
            silo_up=Counter(record.silo_up),
            silo_down=Counter(record.silo_down),
            sent=record.sent,
            received=record.received,
            refused=Counter(record.refused),
            participations=Counter(record.participations),
            discarded=Counter(record.discarded),
            failed=record.failed,
            failures=Counter(record.failures),
            unusable=dict(record.unusable),
            errors=dict(record.errors),
            events=record.events,
            seconds=dict(record.seconds),
        )
