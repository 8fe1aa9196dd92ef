"""What left each process: payloads counted from message logs. The audit and the report of a run both count with it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from fedmq.wire.log_records import MessageRecord

_Counts = defaultdict[str, Counter[str]]


@dataclass
class SentPayloads:
    """Payloads by the process that sent them and by kind.

    Args:
        number: number of payloads.
        bytes: total size of their tensors [bytes]; 0 for a kind that holds numbers or words only.
    """

    number: _Counts = field(default_factory=lambda: defaultdict(Counter))
    bytes: _Counts = field(default_factory=lambda: defaultdict(Counter))

    def add(self, process: str, record: MessageRecord) -> None:
        """Count the payloads of a message that a process sent."""
        for kind, size in record.payloads:
            self.number[process][kind] += 1
            self.bytes[process][kind] += size


def sent_payloads(messages: Iterable[MessageRecord], logged: Container[str]) -> SentPayloads:
    """Count the payloads that each process sent, from its own log, or from the receiver's if its own is missing.

    Args:
        messages: messages as each end logged them.
        logged: processes whose logs are available.
    """
    found = SentPayloads()
    for record in messages:
        sender = record.header.sender
        if record.action == "sent" or sender not in logged:
            found.add(sender, record)
    return found
