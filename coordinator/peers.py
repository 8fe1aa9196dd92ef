"""The coordinator's peers as its loop sees them: the interface, the inbox, and peers within this process.

Peers with processes of their own are in :mod:`coordinator.sessions`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from coordinator.faults import FaultInjector, Frames
from coordinator.round_events import Failed
from fedmq.clock import Clock
from fedmq.errors import DiskError, FedmqError, RemoteWireError
from fedmq.profiling import party, span
from fedmq.storage.logs import ErrorFile
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.channel import BEAT_SECONDS
from fedmq.wire.limits import UNKNOWN
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import COORDINATOR, EVALUATOR, Header, Kind, Message, Reason
from fedmq.wire.payloads import Error, Payload


@dataclass(frozen=True)
class Ready:
    """A peer finished its handshake, or is reachable again after messages were lost."""

    name: str  # the name under which its key is accepted
    returned: bool  # it had joined before; messages in transit to or from it may be lost


@dataclass(frozen=True)
class Unusable:
    """A peer's authentic but unreadable message, which was refused, counted and logged."""

    header: Header
    reason: str  # why it was refused
    detail: str  # the same, as one line for a reader


class Peers(ABC):
    """All peers of a run: :class:`coordinator.sessions.Roster`, :class:`coordinator.peers.InProcessPeers`."""

    uri: str
    wired: ClassVar[bool] = True

    def __init__(self, run: str, log: MessageLog, clock: Clock) -> None:
        self.run, self._log, self._clock = run, log, clock
        self.sent = 0
        self.received = 0
        self.refused: Counter[str] = Counter()
        self.refusal, self.refused_at = "", 0.0
        self.failures: dict[str, str] = {}
        self.undelivered: dict[str, int] = {}
        self.unaccepted: dict[str, int] = {}

    def header(
        self, receiver: str, kind: Kind, *, sequence: int = 0, reply_to: int | None = None, base_version: int = 0
    ) -> Header:
        """A header from the coordinator to ``receiver``, stamped with the current time."""
        return Header(
            run=self.run,
            kind=kind,
            sender=COORDINATOR,
            receiver=receiver,
            sequence=sequence,
            reply_to=reply_to,
            base_version=base_version,
            sent_at=self._clock.now(),
        )

    @abstractmethod
    def receive(self, timeout_s: float | None = None) -> tuple[bytes, list[Any]] | None:
        """The address and the unread frames of the next message, for :meth:`take`; None after ``timeout_s`` [s]."""

    @abstractmethod
    def take(
        self, address: bytes, frames: Sequence[Any], header: Header | None = None
    ) -> Message | Ready | Unusable | None:
        """Decode received frames: a message, a peer that is ready, an unusable message, or None for the loop.

        Refusals are counted and logged here; they do not raise.
        """

    @abstractmethod
    def send(self, name: str, message: Message | Header) -> int:
        """Send a message; returns its size [bytes] (1 without frames), or 0 if the peer is not online."""

    @abstractmethod
    def online(self, name: str) -> bool:
        """Whether messages can be sent to a peer."""

    @abstractmethod
    def drop(self, name: str) -> bool:
        """Remove a peer until it is ready again; returns whether it was online."""

    def refuse(self, name: str, error: RemoteWireError, size: int) -> int | None:
        """Count and log a refusal; returns the number of its log record, None if it is counted, but not logged."""
        self._count(name, error)
        return self._log.refused(name, error.reason, error.detail, size)

    def _count(self, name: str, error: RemoteWireError) -> None:
        self.refused[error.reason] += 1
        who = "" if name == UNKNOWN else f"{name}: "
        self.refusal, self.refused_at = f"{who}{error.detail}", self._clock.stopwatch()

    def dismiss(self, names: Sequence[str]) -> list[str]:
        """Tell peers, and those that have not joined, that the run is over; returns those that are not connected."""
        return [name for name in names if not self.send(name, self.header(name, Kind.STOP))]

    def pause(self) -> None:  # noqa: B027 - peers within this process end with it
        """Tell peers that this process ends before the run does, unless they were dismissed."""

    def silent(self, seconds: float, at: float) -> list[str]:
        """Peers not heard for more than ``seconds`` at the stopwatch's time ``at`` [s]."""
        return []

    def heard(self) -> Mapping[str, float]:
        """Stopwatch time of the last message of each connected peer [s]; empty where there are no heartbeats."""
        return {}

    def joining(self) -> Mapping[str, float]:
        """Stopwatch time of the last message of each peer that has a session but has not joined [s]."""
        return {}

    def committed(self, tasks: Mapping[str, int]) -> None:  # noqa: B027 - silos of other processes write all states
        """Tell silos in this process their last committed tasks; no later checkpoint needs older states."""

    def settle(self) -> None:  # noqa: B027 - silos of other processes reply only once their states are on disk
        """Wait until the personal states of silos whose replies have arrived are on disk."""

    def close(self) -> None:  # noqa: B027 - peers of other processes close their own
        """Wait for the answers that are being computed in this process; no others are begun."""

    def note_unlogged(self) -> None:  # noqa: B027 - nothing is left to log where every refusal is
        """Log the number of refusals that were counted but not logged since the last call."""


#: Answers a task or an evaluation request with the payloads of the reply.
PeerFunction = Callable[[Message], tuple[Payload, ...]]


@dataclass(frozen=True)
class PeerFunctions:
    """All peers of a run as functions of this process."""

    answers: Mapping[str, PeerFunction]  # the function of each silo and of the evaluator, by name
    committed: Callable[[Mapping[str, int]], None]  # tells the silos their last committed tasks
    settle: Callable[[], None]  # writes the personal states of the silos to disk
    pool: ThreadPoolExecutor | None = None  # computes answers of several peers at a time; None: one, when it is read


class InProcessPeers(Peers):
    """All peers of a run as functions; the message log receives notes only.

    With a pool, requests to different peers are answered in parallel, while their answers are read in the order of the
    requests: each answer depends only on the request and on its peer's state, so the result is that of one thread.
    """

    uri = "inline"
    wired = False

    def __init__(self, peers: PeerFunctions, run: str, log: MessageLog, clock: Clock, folder: RunFolder) -> None:
        super().__init__(run, log, clock)
        self._peers = peers
        self._errors = {name: ErrorFile(folder.errors(name)) for name in peers.answers}
        self.queue: deque[Ready | Message] = deque(Ready(name, returned=False) for name in sorted(peers.answers))
        self._joined: set[str] = set()
        self._begun: dict[str, Future[tuple[Payload, ...]]] = {}  # the first unread answer of each peer

    @override
    def close(self) -> None:
        if self._peers.pool is not None:
            self._peers.pool.shutdown(cancel_futures=True)

    @override
    def committed(self, tasks: Mapping[str, int]) -> None:
        self._await_silos()
        self._peers.committed(tasks)

    @override
    def settle(self) -> None:
        self._await_silos()
        self._peers.settle()

    def _await_silos(self) -> None:
        """Wait for the answers that use personal states; the evaluator's do not."""
        wait([answer for name, answer in self._begun.items() if name != EVALUATOR])

    @override
    def receive(self, timeout_s: float | None = None) -> tuple[bytes, list[Any]] | None:
        """The next peer that joins, or the answer to the oldest open request."""
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
            payloads = self._payloads(request)
        except DiskError:
            raise  # it would end a silo's process, too; the run can be resumed
        except Exception as error:
            if not isinstance(error, FedmqError):  # the text of a known error suffices
                self._errors[header.receiver].add(error, header.receiver, f"{header.kind} {header.sequence}")
            text = f"task {header.sequence}: {type(error).__name__}: {error}"
            payloads, kind = (Error.of_task(error, text),), Kind.ERROR
        return Message(
            Header(
                run=self.run,
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

    def _payloads(self, request: Message) -> tuple[Payload, ...]:
        pool, begun = self._peers.pool, self._begun.pop(request.header.receiver, None)
        if pool is None:
            return self._compute(request)
        with span("wait"):
            return (begun or pool.submit(self._compute, request)).result()

    def _compute(self, request: Message) -> tuple[Payload, ...]:
        name = request.header.receiver
        with party(name):
            payloads = self._peers.answers[name](request)
        for payload in payloads:
            _ = payload.largest  # kept for :meth:`take`
        return payloads

    @override
    def take(self, address: bytes, frames: Sequence[Any], header: Header | None = None) -> Any:
        """Take a message of :meth:`receive`; a reply with non-finite numbers is refused as by the codec."""
        taken = frames[0]
        if not all(math.isfinite(payload.largest) for payload in getattr(taken, "payloads", ())):
            error = RemoteWireError(Reason.NOT_FINITE, "NaN or infinity")
            self.refuse(taken.header.sender, error, 0)
            return Unusable(taken.header, error.reason, str(error))
        return taken

    @override
    def online(self, name: str) -> bool:
        """Whether a peer has joined."""
        return name in self._joined

    @override
    def send(self, name: str, message: Message | Header) -> int:
        """Queue a request; layouts and stops need no answer. Returns 1, or 0 if the peer has not joined."""
        if name not in self._joined:
            return 0
        self.sent += 1
        if isinstance(message, Message) and message.header.kind in (Kind.TASK, Kind.EVALUATE):
            self.queue.append(message)
            # A later request of the same peer follows the answer to this one.
            if self._peers.pool is not None and name not in self._begun:
                self._begun[name] = self._peers.pool.submit(self._compute, message)
        return 1

    @override
    def drop(self, name: str) -> bool:
        """Remove a peer; returns whether it had joined."""
        joined = name in self._joined
        self._joined.discard(name)
        return joined


#: Messages received in a row before events are handled, so that a peer that floods the socket cannot stall the run.
#: Until the queue is empty no peer counts as silent, because its messages may still be queued.
MESSAGES_AT_ONCE = 256


class Inbox:
    """The messages of a run's peers, after the fault injector has lost, delayed and damaged some."""

    def __init__(self, roster: Peers, log: MessageLog, clock: Clock, fault_injector: FaultInjector) -> None:
        self._roster, self._log, self._clock, self._fault_injector = roster, log, clock, fault_injector
        self.caught_up = clock.stopwatch()

    def receive(self, wait: float) -> Iterator[tuple[Message | Ready | Unusable | Failed, int | None]]:
        """Read a limited number of messages; wait at most ``wait`` [s] for the first one.

        Yields:
            A message, a peer that is ready, an unusable message, or a task that fails because its reply is lost; with
            the number of its log record, None if it has none. The next message is read after this one is handled.
        """
        for _ in range(MESSAGES_AT_ONCE):
            began = self._clock.stopwatch()
            received = self._roster.receive(wait)
            if received is None:
                now = self._clock.stopwatch()
                if now - began < wait + BEAT_SECONDS:  # otherwise this process stood still: messages may be unread
                    self.caught_up = now
                return
            wait = 0.0
            arrived, lost = list[Frames]([(*received, None)]), list[Failed]()
            if self._fault_injector.strikes_frames:
                arrived, lost = self._fault_injector.incoming(*received)
            for failed in lost:
                yield failed, failed.cause
            for frames in arrived:
                before = self._log.records
                taken = self._roster.take(*frames)
                if taken is not None:  # messages within this process have no log record
                    yield taken, self._log.records - 1 if self._log.records > before else None
