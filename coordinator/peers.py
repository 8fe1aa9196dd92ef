"""What the coordinator's loop needs of its peers, whether they are processes on a wire or functions in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fedmq.errors import RemoteWireError
from fedmq.wire.messages import Header, Kind, Message


@dataclass(frozen=True)
class Ready:
    """A peer finished its handshake, or came through again after messages of its were lost.

    Args:
        name: as its key is accepted under.
        returned: it was here before; whatever was on its way to or from it may be lost.
    """

    name: str
    returned: bool


@dataclass(frozen=True)
class Unusable:
    """A peer's message proved authentic, but it cannot be read; it was refused, counted and logged.

    Args:
        header: of the message.
        reason: of the refusal.
    """

    header: Header
    reason: str


class Peers(Protocol):
    """All peers of a run: :class:`coordinator.roster.Roster`, :class:`coordinator.in_process_peers.InProcessPeers`.

    Attributes:
        sent: messages sent by this process.
        received: messages received by it.
        refused: refusals by their reason.
        refusal: the last one, in words.
    """

    sent: int
    received: int
    refused: Counter[str]
    refusal: str

    @property
    def uri(self) -> str:
        """Where peers connect."""

    @property
    def wired(self) -> bool:
        """Whether messages pass a transport as sealed frames, which both ends log; otherwise they are handed over."""

    def receive(self, timeout_s: float | None = None) -> tuple[bytes, list[Any]] | None:
        """What arrives next, not looked into: a peer's address and frames, for :meth:`take`; None if nothing does.

        Args:
            timeout_s: how long to wait [s]; 0 only looks, None waits for ever.

        Raises:
            RemoteWireError: a message of another number of frames; it is gone, the next can be read.
        """

    def take(self, address: bytes, frames: Sequence[Any]) -> Message | Ready | Unusable | None:
        """Take what arrived: a message, a peer that is here (again), or nothing the loop needs to know of.

        Refusals are counted and logged here; they never raise.
        """

    def header(
        self, receiver: str, kind: Kind, *, sequence: int = 0, reply_to: int | None = None, base_version: int = 0
    ) -> Header:
        """A header of ours for a message to ``receiver``, stamped now."""

    def send(self, name: str, message: Message | Header) -> int:
        """Send a message to a peer; returns its size in bytes (1 without frames), 0 if the peer is not online."""

    def online(self, name: str) -> bool:
        """Whether a peer can be sent to."""

    def silent(self, seconds: float, at: float) -> list[str]:
        """Peers that by the stopwatch's time ``at`` [s] had not been heard for so long."""

    def drop(self, name: str) -> bool:
        """Forget a peer until it is ready again; returns whether it was online."""

    def refuse(self, name: str, error: RemoteWireError, size: int) -> None:
        """Count and log a refusal of a message of ``size`` bytes."""

    def note_unlogged(self) -> None:
        """Log how many refusals were counted and not logged since this was last done."""
