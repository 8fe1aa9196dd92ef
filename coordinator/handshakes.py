"""Handshakes of peers with the coordinator, and how many of their hellos it answers."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fedmq.clock import Clock
from fedmq.config.sections import Wire
from fedmq.errors import RemoteWireError
from fedmq.wire.codec import decode_header
from fedmq.wire.handshake import Responded, confirm, reject, respond
from fedmq.wire.keys import AcceptedKeys, Identity
from fedmq.wire.limits import BoundedDict, PeerRateLimits, RateLimit
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import ANY_RUN, Header, Kind, Reason
from fedmq.wire.sealed_sessions import Session
from fedmq.wire.transports.base import Listener

#: Maximum number of unfinished handshakes, and of digests of answered hellos, that are kept; the oldest are dropped.
MAX_PENDING = 4096
#: Maximum number of handshakes of a peer in a burst; one more is allowed per second. Copies of a hello, and refused
#: hellos of all senders, have limits of their own, so that their senders cannot use up what a peer may send.
HELLOS, COPIES, REJECTIONS = 30, 300, 100


@dataclass(frozen=True)
class PendingHandshake:
    """A handshake between welcome and ready.

    Args:
        hello: SHA-256 of the hello.
        welcome: its answer.
        responded: state of the handshake.
    """

    hello: bytes
    welcome: tuple[bytes, bytes]
    responded: Responded


class Handshakes:
    """Answers the hellos of a roster's peers, and completes their handshakes.

    Args:
        listener: the transport's listening end.
        identity: the coordinator's name and key.
        accepted: public keys of the peers that can open a session.
        run: name of the run.
        log: the coordinator's message log.
        clock: clock for the rate limits and time stamps.
        names: names of the run's silos and evaluator; holders of other accepted keys can only inquire. None admits all.
        options: what the coordinator hides of its messages.
    """

    def __init__(
        self,
        listener: Listener,
        identity: Identity,
        accepted: AcceptedKeys,
        run: str,
        log: MessageLog,
        clock: Clock,
        names: Collection[str] | None,
        options: Wire,
    ) -> None:
        self._listener, self._identity, self._accepted, self._run = listener, identity, accepted, run
        self._log, self._clock, self._names, self._options = log, clock, names, options
        self._pending = BoundedDict[bytes, PendingHandshake](MAX_PENDING)
        self._answered = BoundedDict[bytes, None](MAX_PENDING)
        # By peer, not by connection or session, as a peer could open new ones.
        self._hellos, self._copies = PeerRateLimits(HELLOS), PeerRateLimits(COPIES, 10.0)
        self._rejections = RateLimit(REJECTIONS, clock.stopwatch(), 10.0)

    def hello(self, address: bytes, frames: Sequence[memoryview]) -> None:
        """Answer a hello.

        Args:
            address: where the frames came from.
            frames: the frames.

        Raises:
            RemoteWireError: it is not answered with a welcome.
        """
        digest = hashlib.sha256(b"".join(frames)).digest()
        pending = self._pending.get(address)
        if pending is not None and pending.hello == digest:
            self._listener.send(address, pending.welcome)
            return
        self._check_limits(decode_header(frames[0]), copy=digest in self._answered)
        try:
            welcome, responded = respond(
                self._identity, self._accepted, self._run, frames, self._clock.now(), options=self._options
            )
        except RemoteWireError as error:
            self._reject(address, frames, error)
            if error.reason == Reason.WRONG_RUN:  # checked before the key, so the name is a claim
                detail = f"claims to be {decode_header(frames[0]).sender}, with another scenario: {error.detail}"
                raise RemoteWireError(Reason.WRONG_RUN, detail) from None
            raise
        # A hello is not encrypted, so a relay may send copies of it. Each is answered, or a copy that arrives first
        # would lock the sender out; it is logged once, since only its sender can complete the handshake.
        repeated = digest in self._answered
        (self._copies if repeated else self._hellos).take((responded.peer, responded.inquiry), self._clock.stopwatch())
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

    def complete(self, address: bytes, frames: Sequence[memoryview]) -> tuple[Responded, Session]:
        """The handshake that a ready or inquire message completes, and its session; arguments as in :meth:`hello`.

        Raises:
            RemoteWireError: there is no such handshake, or the message is not authentic.
        """
        pending = self._pending.get(address)
        if pending is None:
            raise RemoteWireError(Reason.UNEXPECTED, "a ready before a welcome")
        session = confirm(pending.responded, frames)
        del self._pending[address]
        return pending.responded, session

    def forget(self, address: bytes) -> None:
        """Drop the unfinished handshake on a connection, if there is one."""
        self._pending.pop(address, None)

    def forget_peer(self, name: str) -> None:
        """Drop the unfinished handshakes of a peer."""
        for address in [address for address, pending in self._pending.items() if pending.responded.peer == name]:
            del self._pending[address]

    def _check_limits(self, claim: Header, *, copy: bool) -> None:
        """Refuse a hello of a peer that has sent too many, before computing a signature or a key agreement.

        Only hellos that were signed with the peer's key count, so no other sender can use up its limit.
        """
        limits, who = self._copies if copy else self._hellos, (claim.sender, claim.run == ANY_RUN)
        if claim.sender in self._accepted and not limits.left(who, self._clock.stopwatch()):
            raise RemoteWireError(Reason.TOO_OFTEN, f"more than {HELLOS} handshakes at once, then one per second")

    def _reject(self, address: bytes, frames: Sequence[memoryview], error: RemoteWireError) -> None:
        """Answer a refused hello, unless too many were answered."""
        allowed, now = self._rejections.take(self._clock.stopwatch()), self._clock.now()
        if allowed and (rejection := reject(self._identity, self._accepted, frames, error, now)) is not None:
            self._listener.send(address, rejection)
