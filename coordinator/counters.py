"""Counters of a run for its summary; they survive a resume with the checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from coordinator.checkpoint_records import CountersRecord
from fedmq.wire.messages import Payload, tensor_bytes


@dataclass
class Counters:
    """What is counted.

    Args:
        up: bytes of payload tensors in the silos' replies, by kind: all that reached the coordinator, merged or not.
        down: bytes of payload tensors in the tasks, by kind, as often as they were sent.
        sent: messages the coordinator sent.
        received: messages it received.
        refused: frames it refused, by reason.
        participations: merged replies, by silo.
        discarded: replies that came but were not merged, by reason.
        failed: tasks that brought no usable reply.
        errors: what silos said was wrong with theirs, since the last merge that had a reply.
        events: that were dealt with, the one under way included.
        seconds: real seconds by phase and in all, summed over resumes.
    """

    up: Counter[str] = field(default_factory=Counter)
    down: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    received: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    participations: Counter[str] = field(default_factory=Counter)
    discarded: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    errors: dict[str, str] = field(default_factory=dict)
    events: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Add real seconds to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def add_traffic(self, way: Literal["up", "down"], payloads: Iterable[Payload]) -> None:
        """Count what a message carried."""
        counter = self.up if way == "up" else self.down
        for payload in payloads:
            # Scalars travel inside the body's header; count them as the eight bytes they stand for.
            counter[payload.KIND] += tensor_bytes(payload) or 8

    def to_record(self) -> CountersRecord:
        """As a checkpoint keeps them."""
        plain = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}
        return CountersRecord.model_validate(plain)

    @classmethod
    def from_record(cls, record: CountersRecord) -> Counters:
        """The inverse of :meth:`to_record`."""
        return cls(
            up=Counter(record.up),
            down=Counter(record.down),
            sent=record.sent,
            received=record.received,
            refused=Counter(record.refused),
            participations=Counter(record.participations),
            discarded=Counter(record.discarded),
            failed=record.failed,
            errors=dict(record.errors),
            events=record.events,
            seconds=dict(record.seconds),
        )
