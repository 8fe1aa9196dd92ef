"""Who gets a session: handshakes, at a limited rate, and duplicate logins.

A process ends its session before it begins another one, and the connection of a killed process is closed. So if an
earlier session continues, a second process was started with the same key, perhaps in a folder without the silo's
personal state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fedmq.clock import Clock
from fedmq.config.sections import Wire
from fedmq.errors import RemoteWireError
from fedmq.storage.logs import Logger
from fedmq.wire.channel import BEAT_SECONDS, LOST_BEATS
from fedmq.wire.handshake import Responded, confirm, reject, respond
from fedmq.wire.keys import AcceptedKeys, Identity
from fedmq.wire.limits import BoundedDict, RateLimit, peer_rate_limits
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import ANY_RUN, Header, Kind, Reason
from fedmq.wire.sessions import Session
from fedmq.wire.transports.base import Listener

#: Maximum number of unfinished handshakes, and of digests of answered hellos, that are kept; the oldest are dropped.
MAX_PENDING = 4096
#: Maximum number of handshakes of a peer in a burst; one more is allowed per second. Copies of a hello, and refused
#: hellos of all senders, have limits of their own, so that their senders cannot use up what a peer may send.
HELLOS, COPIES, REJECTIONS = 30, 300, 100


@dataclass(frozen=True)
class PendingHandshake:
    """A handshake between welcome and ready."""

    hello: bytes  # SHA-256 of the hello
    welcome: tuple[bytes, bytes]
    responded: Responded


class Handshakes:
    """Answers the hellos of a roster's peers, and completes their handshakes."""

    def __init__(
        self,
        listener: Listener,  # the transport's listening end
        identity: Identity,
        accepted: AcceptedKeys,  # public keys of the peers that can open a session
        run: str,
        log: MessageLog,
        clock: Clock,
        # Names of the run's silos and evaluator; holders of other accepted keys can only inquire. None admits all.
        names: Collection[str] | None,
        options: Wire,  # what the coordinator hides of its messages
    ) -> None:
        self._listener, self._identity, self._accepted, self._run = listener, identity, accepted, run
        self._log, self._clock, self._names, self._options = log, clock, names, options
        self._pending = BoundedDict[bytes, PendingHandshake](MAX_PENDING)
        self._answered = BoundedDict[bytes, None](MAX_PENDING)
        # By peer, not by connection or session, as a peer could open new ones.
        self._hellos, self._copies = peer_rate_limits(HELLOS), peer_rate_limits(COPIES, 10.0)
        self._rejections = RateLimit(REJECTIONS, clock.stopwatch(), 10.0)

    def hello(self, address: bytes, header: Header, frames: Sequence[memoryview]) -> None:
        """Answer a hello.

        Raises:
            RemoteWireError: it is not answered with a welcome.
        """
        digest = hashlib.sha256(b"".join(frames)).digest()
        pending = self._pending.get(address)
        if pending is not None and pending.hello == digest:
            self._listener.send(address, pending.welcome)
            return
        self._check_limits(header, copy=digest in self._answered)
        try:
            now = self._clock.now()
            welcome, responded = respond(
                self._identity, self._accepted, self._run, frames, now, options=self._options, header=header
            )
        except RemoteWireError as error:
            self._reject(address, frames, error)
            if error.reason == Reason.WRONG_RUN:  # checked before the key, so the name is a claim
                detail = f"claims to be {header.sender}, with another scenario: {error.detail}"
                raise RemoteWireError(Reason.WRONG_RUN, detail) from None
            raise
        # A hello is not encrypted, so a relay may send copies of it. Each is answered, or a copy that arrives first
        # would lock the sender out; it is logged once, since only its sender can complete the handshake.
        repeated = digest in self._answered
        (self._copies if repeated else self._hellos)[responded.peer, responded.inquiry].take(self._clock.stopwatch())
        if not (responded.inquiry or self._names is None or responded.peer in self._names):
            stranger = RemoteWireError(Reason.UNEXPECTED, f"{responded.peer} is not a silo of this scenario")
            self._reject(address, frames, stranger)
            raise stranger
        self._answered[digest] = None
        self._pending[address] = PendingHandshake(digest, welcome, responded)
        # The sender of an inquiry may keep no log for an audit to compare with; the inquiry is noted instead.
        if not repeated and not responded.inquiry:
            self._log.handshake("received", Kind.HELLO, responded.peer, sum(frame.nbytes for frame in frames))
            self._log.handshake("sent", Kind.WELCOME, responded.peer, sum(map(len, welcome)))
        self._listener.send(address, welcome)

    def complete(self, address: bytes, header: Header, frames: Sequence[memoryview]) -> tuple[Responded, Session]:
        """The handshake that a ready or inquire message completes, and its session.

        Raises:
            RemoteWireError: there is no such handshake, or the message is not authentic.
        """
        pending = self._pending.get(address)
        if pending is None:
            raise RemoteWireError(Reason.UNEXPECTED, "a ready before a welcome")
        session = confirm(pending.responded, frames, header)
        del self._pending[address]
        self._listener.keep(address)
        return pending.responded, session

    def forget_peer(self, name: str) -> None:
        """Drop the unfinished handshakes of a peer."""
        for address in [address for address, pending in self._pending.items() if pending.responded.peer == name]:
            del self._pending[address]

    def _check_limits(self, claim: Header, *, copy: bool) -> None:
        """Refuse a hello of a peer that has sent too many, before computing a signature or a key agreement.

        Only hellos that were signed with the peer's key count, so no other sender can use up its limit.
        """
        limits, who = self._copies if copy else self._hellos, (claim.sender, claim.run == ANY_RUN)
        if claim.sender in self._accepted and not limits[who].left(self._clock.stopwatch()):
            raise RemoteWireError(Reason.TOO_OFTEN, f"more than {HELLOS} handshakes at once, then one per second")

    def _reject(self, address: bytes, frames: Sequence[memoryview], error: RemoteWireError) -> None:
        """Answer a refused hello, unless too many were answered."""
        allowed, now = self._rejections.take(self._clock.stopwatch()), self._clock.now()
        if allowed and (rejection := reject(self._identity, self._accepted, frames, error, now)) is not None:
            self._listener.send(address, rejection)


@dataclass
class Peer:
    """A peer with a session."""

    name: str  # the name under which its key is accepted
    address: bytes  # the transport's identifier of its connection
    session: Session  # keys and counters of the session
    heard: float  # stopwatch time of its last message [s]


#: Maximum number of replaced sessions that are remembered; the oldest are forgotten.
_MOST = 4096


class ReplacedSessions:
    """The replaced sessions of a roster."""

    def __init__(self, clock: Clock, patience: float, logger: Logger) -> None:
        self._clock, self._logger = clock, logger
        self._in_transit = BEAT_SECONDS * patience / 2
        self._replaced = BoundedDict[bytes, tuple[Peer, float]](_MOST)

    def add(self, earlier: Peer, address: bytes) -> None:
        """Remember a session unless the one that replaced it is on the same connection, at ``address``."""
        if earlier.address != address:
            self._replaced[earlier.address] = earlier, self._clock.stopwatch()

    def still_used(self, address: bytes, frames: Sequence[memoryview]) -> tuple[bool, Peer | None]:
        """Whether frames are an authentic message of a replaced session, so that they are dropped; and the session,
        once.

        Its process is then told that it is replaced, but not for messages that were in transit when it was.
        """
        peer, since = self._replaced.get(address, (None, 0.0))
        if peer is None:
            return False, None
        try:
            opened = peer.session.open(frames)
        except RemoteWireError:
            return False, None
        in_transit = self._clock.stopwatch() - since < self._in_transit
        if in_transit or opened.header.kind is not Kind.HEARTBEAT:
            return True, None
        del self._replaced[address]
        what = f"{peer.name} joined again while its earlier session was alive: is it running twice?"
        self._logger.warning(what, peer=peer.name)
        return True, peer


class DuplicateLogins:
    """The new sessions of a roster that wait, at most one of each name."""

    def __init__(self, clock: Clock, patience: float) -> None:
        self._clock, self._beat = clock, BEAT_SECONDS * patience
        self._waiting: dict[str, tuple[Peer, float]] = {}

    def must_wait(self, peer: Peer, earlier: Peer | None) -> bool:
        """Whether a session waits until it is clear whether the earlier one of its name continues."""
        now = self._clock.stopwatch()
        # A process that begins a session on the same connection has ended the earlier one.
        if earlier is None or earlier.address == peer.address or now - earlier.heard > LOST_BEATS * self._beat:
            return False
        if not self.waits(peer):
            self._waiting[peer.name] = peer, now
        return True

    def waits(self, peer: Peer) -> bool:
        """Whether a session waits."""
        return self._waiting.get(peer.name, (None, 0.0))[0] is peer

    def forget(self, peer: Peer) -> None:
        """A session of this name joins, so none waits any longer."""
        self._waiting.pop(peer.name, None)

    def refused(self, alive: Peer) -> Peer | None:
        """The waiting session that a heartbeat of the earlier one refuses; it is forgotten.

        A heartbeat that was in transit when the new session began proves nothing: a proxy may deliver it seconds later,
        when its process has begun the new session itself.
        """
        peer, since = self._waiting.get(alive.name, (None, 0.0))
        if peer is None or peer is alive or self._clock.stopwatch() - since < LOST_BEATS * self._beat:
            return None
        del self._waiting[alive.name]
        return peer
