"""The coordinator's peers as its loop sees them: the interface, and peers that are functions in the same process.

Peers with processes of their own are in :mod:`coordinator.sessions`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from fedmq.clock import Clock
from fedmq.errors import DiskError, FedmqError, RemoteWireError
from fedmq.storage.logs import ErrorFile
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.fields import all_finite
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import COORDINATOR, Header, Kind, Message, Reason
from fedmq.wire.payloads import Error, Payload, tensors


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
    """All peers of a run: :class:`coordinator.sessions.Roster`, :class:`coordinator.peers.InProcessPeers`.

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


#: Answers a task or an evaluation request with the payloads of the reply.
PeerFunction = Callable[[Message], tuple[Payload, ...]]


class InProcessPeers:
    """All peers of a run as functions.

    Args:
        answers: the function of each silo and of the evaluator, by name.
        run: name of the run.
        log: the coordinator's message log; receives notes only.
        clock: clock for time stamps.
        folder: the run folder, for tracebacks.
    """

    uri: ClassVar[str] = "inline"
    wired: ClassVar[bool] = False

    def __init__(
        self, answers: Mapping[str, PeerFunction], run: str, log: MessageLog, clock: Clock, folder: RunFolder
    ) -> None:
        self._errors = {name: ErrorFile(folder.errors(name)) for name in answers}
        self._answers, self._run, self._log, self._clock = answers, run, log, clock
        self.header = HeaderMaker(run, COORDINATOR, clock)
        self.queue: deque[Ready | Message] = deque(Ready(name, returned=False) for name in sorted(answers))
        self._joined: set[str] = set()
        self.sent = 0
        self.received = 0
        self.refused: Counter[str] = Counter()
        self.refusal, self.refused_at = "", 0.0
        self.failures: dict[str, str] = {}
        self.undelivered: dict[str, int] = {}
        self.unaccepted: dict[str, int] = {}  # functions of this process have no keys

    def receive(self, timeout_s: float | None = None) -> tuple[bytes, list[Any]] | None:
        """The next peer that joins, or the answer to the oldest open request, computed in this call."""
        if not self.queue:
            return None
        item = self.queue.popleft()
        if isinstance(item, Ready):
            self._joined.add(item.name)
            return b"", [item]
        self.received += 1
        return b"", [self._answer(item)]

    def _answer(self, request: Message) -> Message:
        header = request.header
        payloads: tuple[Payload, ...]
        kind = Kind.REPLY
        try:
            payloads = self._answers[header.receiver](request)
        except DiskError:
            raise  # it would end a silo's process, too; the run can be resumed
        except Exception as error:
            if not isinstance(error, FedmqError):  # the text of a known error suffices
                self._errors[header.receiver].add(error, header.receiver, f"{header.kind} {header.sequence}")
            text = f"task {header.sequence}: {type(error).__name__}: {error}"
            payloads, kind = (Error.of_task(error, text),), Kind.ERROR
        return Message(
            Header(
                run=self._run,
                kind=kind,
                sender=header.receiver,
                receiver=COORDINATOR,
                sequence=header.sequence,
                reply_to=header.sequence,
                base_version=header.base_version,
                sent_at=self._clock.now(),
            ),
            payloads,
        )

    def take(self, address: bytes, frames: Sequence[Any]) -> Any:
        """Take a message of :meth:`receive`; a reply with non-finite numbers is refused as by the codec."""
        taken = frames[0]
        bulk = [array for payload in getattr(taken, "payloads", ()) for array in tensors(payload)]
        if not all(map(all_finite, bulk)):
            error = RemoteWireError(Reason.NOT_FINITE, "NaN or infinity")
            self.refuse(taken.header.sender, error, 0)
            return Unusable(taken.header, error.reason, str(error))
        return taken

    def online(self, name: str) -> bool:
        """Whether a peer has joined."""
        return name in self._joined

    def send(self, name: str, message: Message | Header) -> int:
        """Queue a request; layouts and stops need no answer. Returns 1, or 0 if the peer has not joined."""
        if name not in self._joined:
            return 0
        self.sent += 1
        if isinstance(message, Message) and message.header.kind in (Kind.TASK, Kind.EVALUATE):
            self.queue.append(message)
        return 1

    def refuse(self, name: str, error: RemoteWireError, size: int) -> int:
        """Count and log a refusal; returns the number of its log record."""
        self.refused[error.reason] += 1
        self.refusal, self.refused_at = f"{name}: {error.detail}", self._clock.stopwatch()
        return self._log.refused(name, error.reason, error.detail, size)

    def silent(self, seconds: float, at: float) -> list[str]:
        """Always empty: functions do not go silent."""
        return []

    def heard(self) -> Mapping[str, float]:
        """Always empty: functions send no heartbeats."""
        return {}

    def joining(self) -> Mapping[str, float]:
        """Always empty: functions need not wait."""
        return {}

    def drop(self, name: str) -> bool:
        """Remove a peer; returns whether it had joined."""
        joined = name in self._joined
        self._joined.discard(name)
        return joined

    def dismiss(self, names: Sequence[str]) -> list[str]:
        """Tell peers that the run is over; returns those that have not joined."""
        return [name for name in names if not self.send(name, self.header(name, Kind.STOP))]

    def note_unlogged(self) -> None:
        """Nothing to note: every refusal is logged."""
