"""Peers connected through a transport: their sessions, what is refused of them, and their liveness.

Why a silo was refused: :meth:`Roster.take` refuses frames by the session and the key, :mod:`coordinator.handshakes` a
hello, :mod:`coordinator.data_admission` its data, :mod:`coordinator.updates` its reply. Each refusal is counted by
reason in :attr:`Roster.refused` (``summary.json``: ``messages``) and logged with its sender and detail by
:meth:`Roster.refuse`; those of senders that prove no key are logged at a limited rate.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from typing_extensions import override

from coordinator.data_admission import Admission, Admitted, Agree, OwnDataAdmission, Waiting
from coordinator.handshakes import DuplicateLogins, Handshakes, Peer, ReplacedSessions
from coordinator.peers import Peers, Ready, Unusable
from coordinator.status import Inquiries, ScenarioReports
from fedmq.clock import Clock
from fedmq.config.sections import Wire
from fedmq.errors import RemoteWireError
from fedmq.profiling import span
from fedmq.wire import key_agreement
from fedmq.wire.channel import DISPLACED, EXPELLED, STOPPED
from fedmq.wire.codec import decode_clear
from fedmq.wire.keys import AcceptedKeys, Identity
from fedmq.wire.limits import UNKNOWN, RateLimit, RefusalLog, StaleSessions, peer_rate_limits
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import EVALUATOR, Header, Kind, Message, Reason, ShortHeader
from fedmq.wire.payloads import Error, Model, tensor_bytes
from fedmq.wire.sessions import (
    LEAST_SHARED,
    Opened,
    Sealed,
    Session,
    SharedPart,
    UnreadableError,
    decode_opened,
    seal_message,
    seal_shared,
)
from fedmq.wire.transports.base import Listener

#: Interval at which the folder of accepted keys is checked for changes [s]: a removed key is out within a second.
_KEYS_SECONDS = 0.75
#: Nothing is hidden.
_DEFAULTS = Wire()
#: Maximum number of messages in a burst that a peer may send in addition to one for each request; one more is allowed
#: per second.
MESSAGES = 60
_ALLOWED = f"one message for each request, {MESSAGES} more at once, then one per second"
#: What a peer may send before it has joined.
_BEFORE_JOINING = (Kind.HEARTBEAT, Kind.STATEMENT, Kind.AGREEMENT, Kind.ERROR)
#: The coordinator's messages that a peer answers, but cannot cause to be sent.
_REQUESTS = (Kind.TASK, Kind.SUM, Kind.EVALUATE, Kind.EVALUATE_SILO)


def _bytes_of(frames: Sequence[memoryview]) -> int:
    return sum(frame.nbytes for frame in frames)


class Roster(Peers):
    """All peers of a run with separate processes."""

    def __init__(
        self,
        listener: Listener,  # the transport's listening end
        identity: Identity,
        accepted: AcceptedKeys,  # public keys of the peers that can open a session; the folder is watched for changes
        run: str,
        log: MessageLog,
        clock: Clock,
        max_body: int,  # maximum size of an accepted message body [bytes]
        *,
        patience: float = 1.0,  # factor of the limits of silence, see Channel
        # Decides from the data that peers state which of them join; None admits all peers that prove their key.
        admission: Admission | None = None,
        # Names of the run's silos and evaluator; holders of other accepted keys can only inquire. None admits all.
        names: Collection[str] | None = None,
        options: Wire = _DEFAULTS,  # what the coordinator hides of its messages
        restarted: bool = False,  # whether an earlier process of this coordinator may have had sessions with the peers
    ) -> None:
        super().__init__(run, log, clock)
        self._stale = StaleSessions(log, clock, restarted=restarted)
        self._max_body, self._patience, self._admission = max_body, patience, admission
        self.inquiries: Inquiries | None = None  # answers inquiries about the run's status; None refuses them
        # Of a large model that is sent, sealed once for all peers; padded messages have no part that shows its size.
        self._shares = listener.shares and not options.padding
        self._shared: SharedPart | None = None
        self._reports = ScenarioReports(log)
        self._replaced = ReplacedSessions(clock, patience, log.logger)
        self._duplicates = DuplicateLogins(clock, patience)
        self._joining: dict[str, Peer] = {}
        self._began = clock.stopwatch()
        self._listener, self._identity, self._accepted, self.uri = listener, identity, accepted, listener.uri
        self._handshakes = Handshakes(listener, identity, accepted, run, log, clock, names, options)
        # By peer, not by connection or session, as a peer could open new ones.
        self._rekeys, self._messages = peer_rate_limits(key_agreement.MOST_REKEYS_ANSWERED), peer_rate_limits(MESSAGES)
        self._by_address: dict[bytes, Peer] = {}
        self._by_name: dict[str, Peer] = {}
        self._refusals = RefusalLog(log, clock)
        self._keys_at = -math.inf
        self._expelled: list[bytes] = []
        self._dismissed = False
        without_key = (name for name in names or () if name != EVALUATOR and name not in accepted)
        # The run's peers whose key is not or no longer accepted, with the log record that says so.
        self.unaccepted = {name: log.note(LogEvent.EXPELLED, peer=name) for name in without_key}

    @property
    def elapsed(self) -> float:
        """Real time since the roster was made [s]."""
        return self._clock.stopwatch() - self._began

    @property
    def refused_ago(self) -> float:
        """Real time since the last refusal [s]."""
        return self._clock.stopwatch() - self.refused_at

    @override
    @span("wait")
    def receive(self, timeout_s: float | None = None) -> tuple[bytes, list[memoryview]] | None:
        """Address and frames of the next message, or None after ``timeout_s`` [s]."""
        self.watch_keys()
        try:
            if (waiting := self._listener.receive(0.0)) is not None:
                return waiting
            self._log.settle()
            return self._listener.receive(timeout_s)
        except RemoteWireError as error:  # a wrong number of frames; the next message can be received
            self.refuse(UNKNOWN, error, 0)
            return b"", []

    @override
    def online(self, name: str) -> bool:
        """Whether a peer has a session."""
        return name in self._by_name

    @override
    def take(
        self, address: bytes, frames: Sequence[memoryview], header: Header | ShortHeader | None = None
    ) -> Message | Ready | Unusable | None:
        """Decode received frames, see :class:`coordinator.peers.Peers`; every refusal of a peer's frames is here."""
        if not frames:
            return None
        peer = self._by_address.get(address)
        proven = peer.session.authentic if peer else 0
        try:
            # The header is not authenticated yet; it only selects the handler, which checks it again.
            header = header or decode_clear(frames[0], any_version=True)
            return self._read(address, peer, header, frames)
        except RemoteWireError as error:
            size = _bytes_of(frames)
            if peer is not None and peer.session.authentic > proven:
                return self._refuse_authentic(peer, header, error, size)
            # No key vouches for the frames, even if they arrived on the connection of a session.
            if not self._stale.drop(header, error):
                self._count(UNKNOWN, error)
                self._refusals.add(address, error, size)
            return None

    def _read(
        self, address: bytes, peer: Peer | None, header: Header | ShortHeader, frames: Sequence[memoryview]
    ) -> Message | Ready | None:
        """Handle frames by the kind of their message."""
        kind = header.kind if isinstance(header, Header) else None
        if isinstance(header, Header) and kind is Kind.HELLO:
            self._handshakes.hello(address, header, frames)
            return None
        if isinstance(header, Header) and kind in (Kind.READY, Kind.INQUIRE):
            return self._ready(address, header, frames)
        if peer is not None:
            return self._message(peer, header, frames)
        if (report := self._reports.take(address, frames)) is not None:
            self._note_other_scenario(*report)
            return None
        displaced, first = self._replaced.still_used(address, frames)
        if first is not None:
            error = Error(DISPLACED, "another process has joined with this key")
            self._send(first, Message(self.header(first.name, Kind.ERROR), (error,)))
        if displaced:
            return None
        raise RemoteWireError(Reason.UNKNOWN_SESSION, f"{kind or 'message'} before a handshake")

    def _refuse_authentic(
        self, peer: Peer, header: Header | ShortHeader | None, error: RemoteWireError, size: int
    ) -> Ready | Unusable | None:
        """Refuse a message that a peer's key vouches for: end its session, have it start over, or fail its task."""
        self.refuse(peer.name, error, size)
        peer.heard = self._clock.stopwatch()  # the message is authentic, so the peer is alive
        joining = self._by_name.get(peer.name) is not peer
        if error.reason in (Reason.DATA, Reason.TOO_OFTEN) or (error.reason == Reason.GAP and joining):
            self._turn_away(peer, error)
            return None
        if error.reason == Reason.GAP:
            # Messages were lost: the peer gets its pending requests again.
            return Ready(peer.name, returned=True)
        header = error.header if isinstance(error, UnreadableError) else header
        return None if joining or not isinstance(header, Header) else Unusable(header, error.reason, str(error))

    @override
    def refuse(self, name: str, error: RemoteWireError, size: int) -> int | None:
        """Count and log a refusal; for senders that prove no key, only a limited number per minute is logged."""
        if name != UNKNOWN:
            return super().refuse(name, error, size)
        self._count(name, error)
        self._refusals.add(b"", error, size)
        return None

    def watch_keys(self) -> None:
        """Expel the peers whose keys have been removed or replaced, in every phase; called with each message.

        This is the only place that asks whether a key is still accepted: a handshake takes the key from the same
        folder, and a session or an unfinished handshake ends here.
        """
        now = self._clock.stopwatch()
        if now - self._keys_at < _KEYS_SECONDS:
            return
        self._stale.note()
        self._keys_at, problem = now, self._accepted.problem
        for address in self._expelled:  # a second ago: the last message is on its way
            self._listener.cut(address)
        self._expelled.clear()
        before = dict(self._accepted)
        for name in self._accepted.refresh():
            self._expel(name)
        for name, key in self._accepted.items():
            if before.get(name) != key:
                self._log.note(LogEvent.KEY_ACCEPTED, peer=name, key=key.public_bytes_raw().hex())
        for name in [name for name in self.unaccepted if name in self._accepted]:
            del self.unaccepted[name]
        if self._accepted.problem not in ("", problem):
            self._log.note(LogEvent.KEYS_UNREADABLE, detail=self._accepted.problem)

    def _expel(self, name: str) -> None:
        """End all that a peer has here, whether it has joined or not."""
        self.unaccepted[name] = self._log.note(LogEvent.EXPELLED, peer=name)
        self._handshakes.forget_peer(name)
        for peer in (self._by_name.get(name), self._joining.pop(name, None)):
            if peer is not None:
                error = Error(EXPELLED, "this key is no longer accepted")
                self._send(peer, Message(self.header(name, Kind.ERROR), (error,)))
                self._expelled.append(peer.address)
                self._by_address.pop(peer.address, None)
        self._by_name.pop(name, None)
        if self._admission is not None:
            self._admission.withdraw(name)

    @override
    def note_unlogged(self) -> None:
        """Log the number of refusals that were counted but not logged since the last call."""
        self._refusals.flush()
        self._stale.note(all_=True)

    def _ready(self, address: bytes, header: Header, frames: Sequence[memoryview]) -> Ready | None:
        responded, session = self._handshakes.complete(address, header, frames)
        self._stale.know(session.session)
        if responded.inquiry:
            self._inform(address, responded.peer, session)
            return None
        peer = Peer(responded.peer, address, session, self._clock.stopwatch())
        self._log.handshake("received", Kind.READY, peer.name, _bytes_of(frames))
        if self._admission is None:
            return self._admit(peer)
        # An older session of that name continues until the peer has stated its data.
        if (earlier := self._joining.pop(peer.name, None)) is not None:
            self._by_address.pop(earlier.address, None)
            self._replaced.add(earlier, address)
        # Only now: the earlier handshake may have been on the same connection.
        self._by_address[address] = self._joining[peer.name] = peer
        return None

    def _inform(self, address: bytes, name: str, session: Session) -> None:
        """Answer an inquiry; it neither joins its sender nor touches a session that the name has."""
        if self.inquiries is None:
            raise RemoteWireError(Reason.UNEXPECTED, "no inquiries are answered here")
        message = Message(self.header(name, Kind.STATUS), (self.inquiries.answer(name, self),))
        if self.inquiries.tells_scenario(name):
            self._reports.expect(address, session)
        self._listener.send(address, seal_message(session, message).frames)

    def _note_other_scenario(self, name: str, keys: str) -> None:
        self.refusal, self.refused_at = f"{name}: another scenario: {keys}", self._clock.stopwatch()
        if not self.online(name):
            self.failures[name] = f"another scenario: {keys}"

    def _admit(self, peer: Peer) -> Ready | None:
        """Replace an older session of the peer's name with this one, unless a process may still use the older one."""
        earlier = self._by_name.get(peer.name)
        probe = Message(self.header(peer.name, Kind.HEARTBEAT))
        # Sending fails if the connection is closed, as that of a process that was killed.
        if self._duplicates.must_wait(peer, earlier) and earlier is not None and self._send(earlier, probe):
            self._joining[peer.name] = self._by_address[peer.address] = peer
            return None
        self._duplicates.forget(peer)
        self._joining.pop(peer.name, None)
        self.undelivered.pop(peer.name, None)
        if earlier is not None and earlier is not peer:
            self.drop(peer.name)
            self._replaced.add(earlier, peer.address)
        self._by_address[peer.address] = self._by_name[peer.name] = peer
        return Ready(peer.name, returned=earlier is not None and earlier is not peer)

    def _turn_away(self, peer: Peer, error: RemoteWireError, code: str = "") -> None:
        """End the session of a peer that cannot join, after sending it the reason; ``code`` is that of the error."""
        reason = Error.saying(code or str(Reason(error.reason)), error.detail)
        self._send(peer, Message(self.header(peer.name, Kind.ERROR), (reason,)))
        if self._by_name.get(peer.name) is peer:
            self.drop(peer.name)
        if self._joining.get(peer.name) is peer:
            del self._joining[peer.name]
        self._by_address.pop(peer.address, None)

    def _refuse_second(self, alive: Peer) -> None:
        """Refuse the session of a second process with the key of a peer whose session continues."""
        if (second := self._duplicates.refused(alive)) is not None:
            error = RemoteWireError(Reason.UNEXPECTED, "started twice; the first process takes part")
            self.refuse(alive.name, error, 0)
            self._turn_away(second, error, DISPLACED)

    def _stated(self, peer: Peer, message: Message) -> Ready | None:
        """Handle what a peer states about its data, or confirms."""
        if self._admission is None:
            return None
        match self._admission.decide(peer.name, message):
            case Admitted():
                return self._admit(peer)
            case Agree(payloads):
                self._send(peer, Message(self.header(peer.name, Kind.AGREEMENT), payloads))
            case Waiting(refused):
                for name, detail in refused.items():
                    self._refuse_waiting(name, RemoteWireError(Reason.DATA, detail))
        return None

    def _refuse_waiting(self, name: str, error: RemoteWireError) -> None:
        """Refuse a peer that has stated its data but not joined."""
        self.refuse(name, error, 0)
        if (peer := self._joining.get(name)) is not None:
            self._turn_away(peer, error)

    def refuse_late(self, name: str, detail: str) -> None:
        """Refuse a silo whose data would not fit the run, though they fit the agreement."""
        self._refuse_waiting(name, RemoteWireError(Reason.DATA, detail))

    @override
    def dismiss(self, names: Sequence[str]) -> list[str]:
        """Tell also peers that have not joined that the run is over; returns those that are not connected."""
        self._dismissed = True
        told = set(names).difference(super().dismiss(names))
        for peer in [peer for name, peer in self._joining.items() if name in names]:
            if self._send(peer, Message(self.header(peer.name, Kind.STOP))):
                told.add(peer.name)
        return [name for name in names if name not in told]

    @override
    def pause(self) -> None:
        """Tell peers that this process ends before the run does, unless they were dismissed."""
        for peer in [] if self._dismissed else [*self._by_name.values(), *self._joining.values()]:
            error = Error(STOPPED, "the coordinator was stopped")
            self._send(peer, Message(self.header(peer.name, Kind.ERROR), (error,)))

    def offer(self) -> None:
        """Send what the silos agreed on to all peers that have stated their data but not joined."""
        assert isinstance(self._admission, OwnDataAdmission)  # noqa: S101 - called by its gather alone
        for name, peer in list(self._joining.items()):
            if name in self._admission.stated:
                self._send(peer, Message(self.header(name, Kind.AGREEMENT), self._admission.agreement))

    def _message(
        self, peer: Peer, header: Header | ShortHeader, frames: Sequence[memoryview]
    ) -> Message | Ready | None:
        proven, size = peer.session.authentic, _bytes_of(frames)
        try:
            opened = peer.session.open(frames, max_body=self._max_body, header=header)
        except RemoteWireError:
            if peer.session.authentic > proven:  # its refusal is logged, and a gap has requests sent again
                self._allow(self._messages[peer.name], _ALLOWED)
            raise
        if opened.header.kind is Kind.REKEY:
            self._agree_on_keys(peer, opened, size)
            return None
        self._allow(self._messages[peer.name], _ALLOWED)
        message = decode_opened(opened, max_body=self._max_body)
        if message.header.kind not in _BEFORE_JOINING and self._by_name.get(peer.name) is not peer:
            raise RemoteWireError(Reason.UNEXPECTED, f"a {message.header.kind} of {peer.name}, which has not joined")
        peer.heard = self._clock.stopwatch()
        self.received += 1
        # The next message may be opened, and this one checked, while this one's payloads are still hashed.
        self._log.message("received", message, opened.tag, size, waits=False)
        if message.header.kind is Kind.HEARTBEAT:
            self._refuse_second(peer)
            self._send(peer, Message(self.header(peer.name, Kind.HEARTBEAT)))
            return self._admit(peer) if self._duplicates.waits(peer) else None
        if message.header.kind in (Kind.STATEMENT, Kind.AGREEMENT):
            return self._stated(peer, message)
        return message

    def _allow(self, limit: RateLimit, allowed: str) -> None:
        """Count an authentic message; refuse it if its peer has sent more than allowed."""
        if not limit.take(self._clock.stopwatch()):
            raise RemoteWireError(Reason.TOO_OFTEN, f"more than {allowed}")

    def _agree_on_keys(self, peer: Peer, asked: Opened, size: int) -> None:
        """Give a session the new keys that its peer asks for, unless it asks too often."""
        self._allow(
            self._rekeys[peer.name],
            f"{key_agreement.MOST_REKEYS_ANSWERED} requests for new keys at once, then one per second",
        )
        header = self.header(peer.name, Kind.REKEYED)
        sealed = key_agreement.answer_rekey(self._identity, self._accepted[peer.name], peer.session, asked, header)
        self._stale.know(peer.session.session)
        peer.heard = self._clock.stopwatch()
        self.received += 1
        self.sent += 1
        self._log.message("received", Message(asked.header), asked.tag, size)
        self._log.message("sent", Message(sealed.header), sealed.tag, sealed.size)
        if not self._listener.send(peer.address, sealed.frames):
            self._not_delivered(peer)

    @override
    def send(self, name: str, message: Message | Header) -> int:
        """Seal, log and send a message; returns its size [bytes], or 0 if the peer is not online."""
        self.watch_keys()
        peer = self._by_name.get(name)
        if peer is None:
            return 0
        return self._send(peer, message if isinstance(message, Message) else Message(message))

    @span("send")
    def _send(self, peer: Peer, message: Message) -> int:
        """Seal, log and send a message on a session; returns its size [bytes], or 0 if it cannot be delivered."""
        message = replace(message, head=self._log.sent_head)
        sealed = self._sealed(peer.session, message)
        self._log.message("sent", replace(message, header=sealed.header), sealed.tag, sealed.size)
        self.sent += 1
        if message.header.kind in _REQUESTS:
            self._messages[peer.name].grant()
        if not self._listener.send(peer.address, sealed.frames):
            self._not_delivered(peer)
            return 0
        return sealed.size

    def _sealed(self, session: Session, message: Message) -> Sealed:
        """A sealed message; a large model in it is sealed once for all peers."""
        model = next((each for each in message.payloads if isinstance(each, Model)), None)
        if model is None or not self._shares or tensor_bytes(model) < LEAST_SHARED:
            return seal_message(session, message, self._listener.room)
        if self._shared is None or self._shared.payload is not model:
            self._shared = None  # the new one may use its memory
            self._shared = seal_shared(model, self._listener.room)
        return seal_message(session, message, shared=self._shared)

    def _not_delivered(self, peer: Peer) -> None:
        record = self._log.note(LogEvent.NOT_DELIVERED, peer=peer.name)
        if self._by_name.get(peer.name) is peer:
            self.drop(peer.name)
            self._stale.end(peer.session.session)
            self.undelivered[peer.name] = record

    @override
    def silent(self, seconds: float, at: float) -> list[str]:
        """Peers not heard for more than ``seconds`` at the stopwatch's time ``at`` [s], as the patience allows."""
        return [peer.name for peer in self._by_name.values() if at - peer.heard > seconds * self._patience]

    @override
    def heard(self) -> Mapping[str, float]:
        """Stopwatch time of the last message of each connected peer [s]."""
        return {peer.name: peer.heard for peer in self._by_name.values()}

    @override
    def joining(self) -> Mapping[str, float]:
        """Stopwatch time of the last message of each peer that has stated its data and waits for the others [s]."""
        return {name: peer.heard for name, peer in self._joining.items()}

    @override
    def drop(self, name: str) -> bool:
        """End a peer's session, but not one that it has begun since on its connection; returns whether it had one."""
        peer = self._by_name.pop(name, None)
        if peer is not None and self._by_address.get(peer.address) is peer:
            del self._by_address[peer.address]
        return peer is not None
