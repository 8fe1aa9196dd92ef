"""Interface of the coordinator's loop to its peers, which are separate processes or functions of this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fedmq.clock import Clock
from fedmq.errors import RemoteWireError
from fedmq.wire.messages import Header, Kind, Message


@dataclass(frozen=True)
class Ready:
    """A peer finished its handshake, or is reachable again after messages were lost.

    Args:
        name: the name under which its key is accepted.
        returned: it had joined before; messages in transit to or from it may be lost.
    """

    name: str
    returned: bool


@dataclass(frozen=True)
class Unusable:
    """A peer's authentic but unreadable message, which was refused, counted and logged.

    Args:
        header: header of the message.
        reason: why it was refused.
        detail: the same, as one line for a reader.
    """

    header: Header
    reason: str
    detail: str


@dataclass(frozen=True)
class HeaderMaker:
    """Makes the headers of the coordinator's messages.

    Args:
        run: the run's name.
        sender: the coordinator's name.
        clock: the run's clock.
    """

    run: str
    sender: str
    clock: Clock

    def __call__(
        self, receiver: str, kind: Kind, *, sequence: int = 0, reply_to: int | None = None, base_version: int = 0
    ) -> Header:
        """A header from the coordinator to ``receiver``, stamped with the current time."""
        return Header(
            run=self.run,
            kind=kind,
            sender=self.sender,
            receiver=receiver,
            sequence=sequence,
            reply_to=reply_to,
            base_version=base_version,
            sent_at=self.clock.now(),
        )


class Peers(Protocol):
    """All peers of a run: :class:`coordinator.roster.Roster`, :class:`coordinator.in_process_peers.InProcessPeers`.

    Attributes:
        sent: messages sent by this process.
        received: messages received by this process.
        refused: number of refusals, by reason.
        refusal: text of the last refusal.
        refused_at: stopwatch time of it [s]; 0 without one.
        failures: the last error that each peer reported, or why its last task failed; until it succeeds again.
        undelivered: peers lost as a message could not be delivered, with the number of the log record of that.
        header: makes the headers of messages to a peer.
        unaccepted: peers whose key is not or no longer accepted, with the number of the log record that says so.
    """

    sent: int
    received: int
    refused: Counter[str]
    refusal: str
    refused_at: float
    failures: dict[str, str]
    undelivered: dict[str, int]
    header: HeaderMaker
    unaccepted: dict[str, int]

    @property
    def uri(self) -> str:
        """Where peers connect."""

    @property
    def wired(self) -> bool:
        """Whether messages are sealed frames on a transport, logged at both ends, not objects of this process."""

    def receive(self, timeout_s: float | None = None) -> tuple[bytes, list[Any]] | None:
        """The address and the unread frames of the next message, for :meth:`take`; None if none arrives.

        Args:
            timeout_s: time to wait [s]; 0 does not wait, None waits indefinitely.

        Raises:
            RemoteWireError: a message with a wrong number of frames; it is dropped, the next one can be received.
        """

    def take(self, address: bytes, frames: Sequence[Any]) -> Message | Ready | Unusable | None:
        """Decode received frames: a message, a peer that is ready, an unusable message, or None for the loop.

        Refusals are counted and logged here; they do not raise.
        """

    def send(self, name: str, message: Message | Header) -> int:
        """Send a message; returns its size [bytes] (1 without frames), or 0 if the peer is not online."""

    def online(self, name: str) -> bool:
        """Whether messages can be sent to a peer."""

    def silent(self, seconds: float, at: float) -> list[str]:
        """Peers not heard for more than ``seconds`` at the stopwatch's time ``at`` [s]."""

    def heard(self) -> Mapping[str, float]:
        """Stopwatch time of the last message of each connected peer [s]; empty where there are no heartbeats."""

    def joining(self) -> Mapping[str, float]:
        """Stopwatch time of the last message of each peer that has a session but has not joined [s]."""

    def drop(self, name: str) -> bool:
        """Remove a peer until it is ready again; returns whether it was online."""

    def refuse(self, name: str, error: RemoteWireError, size: int) -> int | None:
        """Count and log a refusal of a message of ``size`` bytes.

        Returns:
            The number of its log record; None if it is counted, but not logged.
        """

    def dismiss(self, names: Sequence[str]) -> list[str]:
        """Tell peers, and those that have not joined, that the run is over; returns those that are not connected."""

    def note_unlogged(self) -> None:
        """Log the number of refusals that were counted but not logged since the last call."""
