"""The channel from a silo or the evaluator to the coordinator, on a thread of its own.

Independently of the training thread, this thread performs the handshake, opens and seals messages, sends heartbeats,
and repeats the handshake when the coordinator goes silent. It makes the connection and is the only thread to use it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import replace

from fedmq.clock import Clock
from fedmq.errors import RemoteWireError
from fedmq.wire.codec import decode_header
from fedmq.wire.handshake import Accepted, Initiated, complete, initiate
from fedmq.wire.keys import Identity
from fedmq.wire.log_records import NoteKind, SignedAt
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import COORDINATOR, Header, Kind, Message, Reason
from fedmq.wire.payloads import Error, Payload, Refusal
from fedmq.wire.sealed_sessions import Session, open_message, seal_message, sealed_size
from fedmq.wire.transports.base import Connection
from fedmq.wire.transports.registry import connect

BEAT_SECONDS = 2.0
#: Heartbeat intervals without a message after which a peer counts as lost.
LOST_BEATS = 2
#: The same for the coordinator, which answers only between merges; the connection reports the death of its process.
_COORDINATOR_BEATS = 15
_HELLO_SECONDS = 2.0
#: Unanswered hellos before ``progress`` reports it, once until there is a session.
_QUIET_HELLOS = 5
#: Longest wait of the thread before it checks the clock again [s].
STEP_SECONDS = 0.25
#: Messages received per step: a peer that floods the channel must not keep this side from sending heartbeats.
_MESSAGES_PER_STEP = 256
#: Steps after which a message that does not fit into the queue is dropped and its session ended.
_MAX_SEND_STEPS = int(BEAT_SECONDS / STEP_SECONDS)


class Channel:
    """An authenticated channel to the coordinator that re-establishes itself.

    Args:
        uri: where the coordinator listens.
        identity: name and key of this process.
        accepted: accepted public keys; the coordinator's must be among them.
        run: the run's name.
        log: the message log of this process; only the channel's thread writes it.
        clock: for liveness.
        now: the run's time as this process knows it [s].
        forbidden: what the policy of this side forbids about a message of a size [bytes]; None allows everything. A
            forbidden message is not sealed: its refusal is sent instead.
        progress: called with one line, in the channel's thread, when the coordinator does not answer for a while. A
            coordinator does not answer a hello that it refuses, since anyone may have sent it.
        patience: factor of the intervals between heartbeats and of the limits of silence, the same at both ends.
        deliver: called in the channel's thread with each message; None keeps them for :meth:`receive`.
    """

    def __init__(
        self,
        uri: str,
        identity: Identity,
        accepted: Accepted,
        run: str,
        log: MessageLog,
        clock: Clock,
        now: Callable[[], float],
        progress: Callable[[str], None] = lambda _: None,
        *,
        forbidden: Callable[[Message, int], Refusal | None] | None = None,
        patience: float = 1.0,
        deliver: Callable[[Message], None] | None = None,
    ) -> None:
        self._forbidden = forbidden
        self._progress, self._unanswered, self._patience = progress, 0, patience
        self._uri, self._identity, self._accepted, self._run = uri, identity, accepted, run
        self._log, self._clock, self._now = log, clock, now
        self._inbox: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()
        self._deliver = deliver or self._inbox.put
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._connection: Connection | None = None
        self._closing = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run_thread, name="link", daemon=True)

        self._session: Session | None = None
        self._initiated: Initiated | None = None
        self._received_at = self._beat_at = self._hello_at = 0.0
        self._connections = 1

    # ------------------------------------------------------------------------------------- for the training thread
    def start(self) -> None:
        """Start connecting."""
        self._thread.start()

    def receive(self, timeout: float | None = None) -> Message | None:
        """Return the next message from the coordinator, or None after ``timeout`` seconds.

        Raises:
            Exception: the error that ended the channel's thread.
        """
        try:
            item = self._inbox.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise item
        return item

    def send(
        self, kind: Kind, payloads: tuple[Payload, ...], *, sequence: int, reply_to: int | None, base_version: int
    ) -> None:
        """Queue a message; it is sent once there is a session."""
        header = Header(
            run=self._run,
            kind=kind,
            sender=self._identity.name,
            receiver=COORDINATOR,
            sequence=sequence,
            reply_to=reply_to,
            base_version=base_version,
            sent_at=self._now(),
        )
        self._outbox.put(Message(header, payloads))
        self._wake()

    def begin_closing(self) -> None:
        """Finish once the queued messages are sent."""
        self._closing.set()
        self._wake()

    def close(self, patience: float = 5.0) -> None:
        """Send the queued messages, then end the thread if it was started; waits at most ``patience`` seconds."""
        self.begin_closing()
        if self._thread.ident is not None:
            self._thread.join(patience)
        self._log.close()

    def _wake(self) -> None:
        """Wake the channel's thread; before it has a connection, it is awake anyway."""
        if self._connection is not None:
            self._connection.wake()

    # ------------------------------------------------------------------------------------------- the channel's thread
    def _run_thread(self) -> None:
        try:
            connection = self.attach(connect(self._uri))
            try:
                while not self.finished:
                    self.step(connection, STEP_SECONDS)
            finally:
                connection.close()
        except BaseException as error:
            self._inbox.put(error)

    def attach(self, connection: Connection) -> Connection:
        """Use a connection that the calling thread has made; returns it."""
        self._connection = connection
        return connection

    @property
    def stopped(self) -> bool:
        """Whether the coordinator sent stop."""
        return self._stopped

    @property
    def has_session(self) -> bool:
        """Whether the handshake is complete."""
        return self._session is not None

    @property
    def has_outgoing(self) -> bool:
        """Whether messages wait to be sent."""
        return not self._outbox.empty()

    @property
    def finished(self) -> bool:
        """Whether the coordinator sent stop, or the channel is closing and its messages are sent."""
        # After its stop the coordinator reads no messages, so queued ones need not be sent.
        return self._stopped or (self._closing.is_set() and (self._session is None or self._outbox.empty()))

    def step(self, connection: Connection, wait_s: float) -> None:
        """Receive and send all pending messages; wait for a message or a wake-up at most ``wait_s`` [s]."""
        self._keep_alive(connection, self._clock.stopwatch())
        self._receive_all(connection, wait_s)
        while self._session is not None and not self._stopped and not self._outbox.empty():
            self._send_sealed(connection, self._session, self._outbox.get())

    def _keep_alive(self, connection: Connection, now: float) -> None:
        beat = BEAT_SECONDS * self._patience
        if self._session is not None and now - self._received_at > beat * _COORDINATOR_BEATS:
            self._end_session(NoteKind.COORDINATOR_SILENT)
        elif self._session is not None and now - self._beat_at > beat * LOST_BEATS:
            self._end_session(NoteKind.STOOD_STILL)
        elif self._session is not None and connection.established() > self._connections:
            # To the coordinator a new connection is a new peer: the session ended with the old connection.
            self._end_session(NoteKind.RECONNECTED)
        if self._session is None:
            if self._initiated is None or now - self._hello_at > _HELLO_SECONDS:
                frames, self._initiated = initiate(self._identity, COORDINATOR, self._run, self._now())
                self._hello_at, self._connections = now, max(1, connection.established())
                self._log.handshake("sent", Kind.HELLO, COORDINATOR, sum(map(len, frames)))
                connection.send(frames)
                self._report_no_answer()
        elif now - self._beat_at >= beat:
            self._beat_at = now
            header = Header(
                run=self._run,
                kind=Kind.HEARTBEAT,
                sender=self._identity.name,
                receiver=COORDINATOR,
                sequence=0,
                sent_at=self._now(),
            )
            self._send_sealed(connection, self._session, Message(header))

    def _report_no_answer(self) -> None:
        self._unanswered += 1
        if self._unanswered == _QUIET_HELLOS + 1:
            self._progress(
                f"{self._identity.name}: no answer from {self._uri} for {_QUIET_HELLOS * _HELLO_SECONDS:.0f} s: no "
                f"coordinator listens there yet, or it runs another scenario (here run {self._run}), or it does not "
                f"know this key of {self._identity.name}; see the coordinator's message log"
            )

    def _send_sealed(self, connection: Connection, session: Session, message: Message) -> None:
        allowed = self._allowed(session, message)
        if allowed is None:
            return
        if allowed.header.kind in (Kind.REPLY, Kind.ERROR):
            self._log.sign(SignedAt.REPLY)
        message = replace(allowed, head=self._log.sent_head)
        sealed = seal_message(session, message)
        # Logged first: a log may list a message that was not sent, but must not lack one that was.
        self._log.message("sent", replace(message, header=sealed.header), sealed.tag, sealed.size)
        for _ in range(_MAX_SEND_STEPS):
            if connection.send(sealed.frames, timeout_s=STEP_SECONDS):
                return
            # Keep receiving while the queue is full: it also fills when the coordinator has just ended, and its stop
            # message cannot be read once the session has been ended.
            self._receive_all(connection)
            if self._stopped or self._session is not session:
                return
        self._end_session(NoteKind.QUEUE_FULL)

    def _allowed(self, session: Session, message: Message) -> Message | None:
        """The message, or what is sent instead if this side's policy forbids it; None sends nothing."""
        if self._forbidden is None:
            return message
        header, head = message.header, self._log.sent_head
        refusal = self._forbidden(message, sealed_size(session, replace(message, head=head)))
        if refusal is None:
            return message
        self._log.note(
            NoteKind.WITHHELD,
            kind=header.kind,
            sequence=header.sequence,
            rule=refusal.rule,
            withheld=refusal.withheld,
        )
        if header.reply_to is None:
            return None
        # Peers of wire version 1 do not know refusals.
        old = session.wire_version == 1
        answer = Error.saying("policy", f"{refusal.withheld} ({refusal.rule})") if old else refusal
        return Message(replace(header, kind=Kind.ERROR), (answer,))

    def _end_session(self, why: NoteKind) -> None:
        """End the session; the next step starts a new handshake, and the coordinator sends a pending task again."""
        self._log.note(why)
        self._session = self._initiated = None

    def _receive_all(self, connection: Connection, wait_s: float = 0.0) -> None:
        """Receive arrived messages up to the limit per step; wait for the first one at most ``wait_s`` seconds."""
        for _ in range(_MESSAGES_PER_STEP):
            if not self._receive_one(connection, wait_s):
                return
            wait_s = 0.0

    def _receive_one(self, connection: Connection, wait_s: float) -> bool:
        """Receive one message unless the coordinator has sent stop; return whether there was one."""
        if self._stopped:
            return False
        size, frames, proven = 0, None, self._session.received if self._session else 0
        try:
            frames = connection.receive(wait_s)
            if frames is None:
                return False
            size = sum(frame.nbytes for frame in frames)
            if self._session is None:
                self._complete_handshake(connection, frames, size)
                return True
            message, tag = open_message(self._session, frames)
        except RemoteWireError as error:
            self._log.refused(COORDINATOR, error.reason, error.detail, size)
            if error.reason == Reason.GAP:
                self._end_session(NoteKind.MESSAGE_LOST)
            elif frames is not None and self._session is not None and self._session.received > proven:
                self._report_unreadable(frames[0], error)
            return True
        self._received_at = self._clock.stopwatch()
        self._log.message("received", message, tag, size)
        self._stopped = message.header.kind is Kind.STOP
        if message.header.kind is not Kind.HEARTBEAT:
            self._deliver(message)
        return True

    def _report_unreadable(self, clear: memoryview, error: RemoteWireError) -> None:
        """Answer an authentic but unreadable message with an error, or the coordinator would wait forever."""
        self._received_at = self._clock.stopwatch()
        header = decode_header(clear)
        if header.kind in (Kind.TASK, Kind.EVALUATE):
            number, base = header.sequence, header.base_version
            answer = Error.saying("unreadable", f"{header.kind} {number}: {error.detail}")
            self.send(Kind.ERROR, (answer,), sequence=number, reply_to=number, base_version=base)

    def _complete_handshake(self, connection: Connection, frames: list[memoryview], size: int) -> None:
        if self._initiated is None:
            raise RemoteWireError(Reason.UNEXPECTED, "a frame before hello")
        # Read the clock first, so that a process suspended from here on notices that it has missed heartbeats.
        now = self._clock.stopwatch()
        ready, session = complete(self._initiated, self._accepted, frames, self._now())
        self._log.handshake("received", Kind.WELCOME, COORDINATOR, size)
        self._log.handshake("sent", Kind.READY, COORDINATOR, sum(memoryview(frame).nbytes for frame in ready))
        connection.send(ready)
        self._session, self._unanswered = session, 0
        self._received_at = self._beat_at = now
