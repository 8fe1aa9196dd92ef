"""Who is on the line: handshakes, sessions, and when each peer was last heard. Frames in, messages out."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.peers import Ready, Unusable
from fedmq.clock import Clock
from fedmq.errors import RemoteWireError
from fedmq.wire.codec import decode_header
from fedmq.wire.handshake import Accepted, Responded, confirm, respond
from fedmq.wire.keys import Identity
from fedmq.wire.log_records import NoteKind
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import Header, Kind, Message, Reason
from fedmq.wire.sessions import Session, open_message, seal_message
from fedmq.wire.transports.base import Listener

#: Handshakes begun and not finished that are remembered; a flood of hellos drops the oldest. As many answered hellos.
_MAX_PENDING = 4096
#: Who a frame is from that no session covers.
_UNKNOWN = "unknown"
#: Their refusals that are logged in a second: anybody can send noise, and a disk is finite.
_UNKNOWN_LOGGED = 100


@dataclass
class Peer:
    """A peer with a session.

    Args:
        name: as its key is accepted under.
        address: the transport's name of its connection.
        session: keys and counters.
        heard: stopwatch when it was last heard [s].
    """

    name: str
    address: bytes
    session: Session
    heard: float


class ReconnectThrottle:
    """Who comes back again and again: each time all that is open is sealed and queued for it, models among it.

    The first time nobody waits; who comes back once more within a beat is dealt with when the beat is over.

    Attributes:
        waiting: who waits for that.
    """

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self.waiting: set[str] = set()

    def must_wait(self, name: str, now: float, beat: float) -> bool:
        """Whether a peer that is here again by the stopwatch's time ``now`` [s] has to wait."""
        if now - self._last.get(name, -math.inf) < beat:
            self.waiting.add(name)
            return True
        self.waiting.discard(name)
        self._last[name] = now if name in self._last else -math.inf
        return False

    def expired(self, now: float, beat: float) -> list[str]:
        """Whose waiting is over."""
        return [name for name in sorted(self.waiting) if now - self._last[name] >= beat]


class Roster:
    """All peers of a run that are processes.

    Args:
        listener: where they connect.
        identity: the coordinator's name and key.
        accepted: the keys accepted; nobody else ever gets a session.
        run: the run's name.
        log: the coordinator's message log.
        clock: for liveness and for stamps.
        max_body: largest body accepted of a peer [bytes].
    """

    def __init__(
        self,
        listener: Listener,
        identity: Identity,
        accepted: Accepted,
        run: str,
        log: MessageLog,
        clock: Clock,
        max_body: int,
    ) -> None:
        self._max_body = max_body
        self._listener, self._identity, self._accepted, self._run = listener, identity, accepted, run
        self._log, self._clock = log, clock
        self._pending: dict[bytes, Responded] = {}
        self._answered: dict[bytes, None] = {}
        self._by_address: dict[bytes, Peer] = {}
        self._by_name: dict[str, Peer] = {}
        self.sent = 0
        self.received = 0
        self.refused: Counter[str] = Counter()
        self.refusal = ""  # the last one
        self._second, self._this_second = -math.inf, 0

    @property
    def uri(self) -> str:
        """Where peers connect."""
        return self._listener.uri

    @property
    def wired(self) -> bool:
        """Messages pass a transport."""
        return True

    def receive(self, timeout_s: float | None = None) -> tuple[bytes, list[memoryview]] | None:
        """The next message's sender and frames as the listener gives them, within ``timeout_s`` [s]."""
        return self._listener.receive(timeout_s)

    def online(self, name: str) -> bool:
        """Whether a peer has a session."""
        return name in self._by_name

    def take(self, address: bytes, frames: Sequence[memoryview]) -> Message | Ready | Unusable | None:
        """Take what arrived: a message, a peer that is here (again), or nothing the loop needs to know of.

        Refusals are counted and logged here; they never raise.
        """
        size = sum(frame.nbytes for frame in frames)
        peer = self._by_address.get(address)
        proven = peer.session.received if peer else 0
        try:
            # The clear header only says which door to knock at; each door checks it again under its own rules.
            header = decode_header(frames[0])
            if header.kind is Kind.HELLO:
                self._hello(address, frames, size)
                return None
            if header.kind is Kind.READY:
                return self._ready(address, frames, size)
            if peer is None:
                raise RemoteWireError(Reason.UNKNOWN_SESSION, f"a {header.kind} before a handshake")
            return self._message(peer, frames, size)
        except RemoteWireError as error:
            self.refuse(peer.name if peer else _UNKNOWN, error, size)
            if peer is None or peer.session.received == proven:
                return None
            # The seal held, so this is the peer's own message and the peer is alive.
            peer.heard = self._clock.stopwatch()
            if error.reason == Reason.GAP:
                # Something was lost on the way: what it was waiting for, it is sent again.
                return Ready(peer.name, returned=True)
            return Unusable(header, error.reason)

    def refuse(self, name: str, error: RemoteWireError, size: int) -> None:
        """Count and log a refusal; of those that cannot be laid at a peer's door a second's first ones are logged."""
        self.refused[error.reason] += 1
        self.refusal = f"{name}: {error.detail}"
        if name == _UNKNOWN and not self._may_log():
            return
        self._log.refused(name, error.reason, error.detail, size)

    def _may_log(self) -> bool:
        """Whether one more refusal of nobody known is logged now; what was left out is noted by its number."""
        now = self._clock.stopwatch()
        if now - self._second >= 1.0:
            self.note_unlogged()
            self._second = now
        self._this_second += 1
        return self._this_second <= _UNKNOWN_LOGGED

    def note_unlogged(self) -> None:
        """Put on record how many refusals were left out since it was last said."""
        left, self._this_second = self._this_second - _UNKNOWN_LOGGED, 0
        if left > 0:
            self._log.note(NoteKind.REFUSALS_COUNTED, count=left)

    def _hello(self, address: bytes, frames: Sequence[memoryview], size: int) -> None:
        # It travels in clear: whoever recorded one can send it again, without a key and as often as he likes.
        digest = hashlib.sha256(b"".join(frames)).digest()
        if digest in self._answered:
            raise RemoteWireError(Reason.REPLAY, "a hello that was answered before")
        welcome, responded = respond(self._identity, self._accepted, self._run, frames, self._clock.now())
        while len(self._answered) >= _MAX_PENDING:
            del self._answered[next(iter(self._answered))]
        self._answered[digest] = None
        self._log.handshake("received", Kind.HELLO, responded.peer, size)
        while len(self._pending) >= _MAX_PENDING:
            del self._pending[next(iter(self._pending))]
        self._pending[address] = responded
        self._log.handshake("sent", Kind.WELCOME, responded.peer, sum(map(len, welcome)))
        self._listener.send(address, welcome)

    def _ready(self, address: bytes, frames: Sequence[memoryview], size: int) -> Ready:
        responded = self._pending.get(address)
        if responded is None:
            raise RemoteWireError(Reason.UNEXPECTED, "a ready before a welcome")
        session = confirm(responded, frames)
        del self._pending[address]
        # Only now, with the peer's key proven, does an older session of that name end.
        returned = self.drop(responded.peer)
        peer = Peer(responded.peer, address, session, self._clock.stopwatch())
        self._by_address[address] = self._by_name[peer.name] = peer
        self._log.handshake("received", Kind.READY, peer.name, size)
        return Ready(peer.name, returned)

    def _message(self, peer: Peer, frames: Sequence[memoryview], size: int) -> Message | None:
        message, tag = open_message(peer.session, frames, max_body=self._max_body)
        peer.heard = self._clock.stopwatch()
        self.received += 1
        self._log.message("received", message, tag, size)
        if message.header.kind is Kind.HEARTBEAT:
            self.send(peer.name, self.header(peer.name, Kind.HEARTBEAT))
            return None
        return message

    def header(
        self, receiver: str, kind: Kind, *, sequence: int = 0, reply_to: int | None = None, base_version: int = 0
    ) -> Header:
        """A header of ours for a message to ``receiver``, stamped now."""
        return Header(
            run=self._run,
            kind=kind,
            sender=self._identity.name,
            receiver=receiver,
            sequence=sequence,
            reply_to=reply_to,
            base_version=base_version,
            sent_at=self._clock.now(),
        )

    def send(self, name: str, message: Message | Header) -> int:
        """Seal, log and send a message; returns its size in bytes, 0 if the peer is not on the line."""
        peer = self._by_name.get(name)
        if peer is None:
            return 0
        whole = message if isinstance(message, Message) else Message(message)
        sealed = seal_message(peer.session, whole)
        self._log.message("sent", replace(whole, header=sealed.header), sealed.tag, sealed.size)
        self.sent += 1
        if not self._listener.send(peer.address, sealed.frames):
            self._log.note(NoteKind.NOT_DELIVERED, peer=name)
            self.drop(name)
            return 0
        return sealed.size

    def silent(self, seconds: float, at: float) -> list[str]:
        """Peers that by the stopwatch's time ``at`` [s] had not been heard for so long."""
        return [peer.name for peer in self._by_name.values() if at - peer.heard > seconds]

    def drop(self, name: str) -> bool:
        """Forget a peer's session; returns whether it had one."""
        peer = self._by_name.pop(name, None)
        if peer is None:
            return False
        self._by_address.pop(peer.address, None)
        self._pending.pop(peer.address, None)
        return True
