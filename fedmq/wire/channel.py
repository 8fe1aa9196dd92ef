"""The channel from a silo or the evaluator to the coordinator, on a separate thread.

Independently of the training thread, this thread performs the handshake, opens and seals messages, sends heartbeats,
and repeats the handshake when the coordinator goes silent. It makes the connection and is the only thread to use it.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fedmq.clock import Clock
from fedmq.config.sections import Wire
from fedmq.errors import InputError, RemoteWireError, RunError
from fedmq.profiling import span
from fedmq.wire import inquiry, key_agreement
from fedmq.wire.handshake import Accepted, HelloRefusedError, Initiated, answers, complete, initiate
from fedmq.wire.keys import AcceptedKeys, Identity
from fedmq.wire.limits import RateLimit, RefusalLog
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import SignedAt
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import COORDINATOR, Header, Kind, Message, Reason
from fedmq.wire.payloads import Error, Payload, Refusal
from fedmq.wire.sessions import Opened, Session, UnreadableError, decode_opened, seal_message
from fedmq.wire.transports.base import Connection, ConnectionRefusal
from fedmq.wire.transports.registry import connect
from fedmq.wire.transports.tickets import ConnectionKeys

BEAT_SECONDS = 2.0
#: Code of the error with which a coordinator ends the session of a peer whose key was removed.
EXPELLED = "expelled"
#: Code of the error with which a coordinator that was stopped ends all sessions; it may be started again.
STOPPED = "stopped"
#: Code of the error for a session that another process's session of the same name has replaced.
DISPLACED = "displaced"
#: Codes of the coordinator's errors that end the session: the event, and what the operator reads about it.
_ENDS = {
    EXPELLED: (LogEvent.EXPELLED, "has removed this key"),
    STOPPED: (LogEvent.COORDINATOR_STOPPED, "was stopped; this process waits for it to be resumed"),
    Reason.TOO_OFTEN.value: (LogEvent.RATE_LIMITED, ""),
}
#: Heartbeat intervals without a message after which a peer counts as lost.
LOST_BEATS = 2
#: The same for the coordinator, which answers only between merges; the connection reports the death of its process.
_COORDINATOR_BEATS = 15
#: Interval between the first hellos [s]; it doubles up to the longest.
_HELLO_SECONDS = 2.0
_LONGEST_HELLO_SECONDS = 30.0
#: Time without an answer before ``progress`` reports it, once until there is a session [s].
_QUIET_SECONDS = 10.0
#: Time without an answer after which a hello is sent on a new connection [s]: the old one may be open, but dead.
MUTE_SECONDS = 60.0
#: Earlier hellos whose late welcomes are recognised.
_EARLIER_HELLOS = 16
#: Maximum time that the thread waits before it checks the clock again [s].
STEP_SECONDS = 0.25
#: Nothing is hidden.
_DEFAULTS = Wire()
#: Messages received per step: a peer that floods the channel must not keep this side from sending heartbeats.
_MESSAGES_PER_STEP = 256
#: Steps after which a message that does not fit into the queue is dropped and its session ended.
_MAX_SEND_STEPS = int(BEAT_SECONDS / STEP_SECONDS)


class OtherRunError(RunError):
    """The coordinator has begun another run."""


class Channel:
    """An authenticated channel to the coordinator that re-establishes itself."""

    def __init__(
        self,
        uri: str,  # URI at which the coordinator listens
        identity: Identity,  # name and key of this process
        accepted: Accepted,  # accepted public keys; the coordinator's must be among them
        run: str,
        log: MessageLog,  # the message log of this process; only the channel's thread writes it
        clock: Clock,
        now: Callable[[], float],  # the run's time as this process knows it [s]
        # Called with one line, in the channel's thread, when the coordinator does not answer for a while, refuses the
        # handshake, or another process answers.
        progress: Callable[[str], None] = lambda _: None,
        *,
        # What the policy of this side forbids about a message of a size [bytes]; None allows everything. A forbidden
        # message is not sealed: its refusal is sent instead.
        forbidden: Callable[[Message, int], Refusal | None] | None = None,
        # Factor of the intervals between heartbeats and of the limits of silence, the same at both ends.
        patience: float = 1.0,
        # Called in the channel's thread with each message; None keeps them for receive.
        deliver: Callable[[Message], None] | None = None,
        options: Wire = _DEFAULTS,  # what this side hides of its messages, and when a session gets new keys
        # Finds the keys of the scenario that differ from a coordinator's; None does not.
        comparison: inquiry.ScenarioComparison | None = None,
        # End with OtherRunError if the coordinator has another scenario, instead of trying again.
        ends_with_other_run: bool = False,
    ) -> None:
        self._ends_with_other_run = ends_with_other_run
        self._options, self._keys_since = options, 0.0
        self._comparison = comparison
        self._rekeying: key_agreement.Rekeying | None = None
        self._rekeys = RateLimit(key_agreement.MOST_REKEYS_MADE, 0.0)
        self._forbidden = forbidden
        self._progress, self._reported, self._patience = progress, set[str](), patience
        self._uri, self._identity, self._accepted, self._run = uri, identity, accepted, run
        self._log, self._clock, self._now = log, clock, now
        self._inbox: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()
        self._deliver = deliver or self._inbox.put
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._connection: Connection | None = None
        self._closing = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run_thread, name="link", daemon=True)

        # What this process states about its data, the first message of each session; set before the start.
        self.statement: tuple[Payload, ...] = ()
        self._session: Session | None = None
        self._initiated: Initiated | None = None
        self._earlier: deque[Initiated] = deque(maxlen=_EARLIER_HELLOS)
        self._refusals = RefusalLog(log, clock)
        self._received_at = self._beat_at = self._hello_at = 0.0
        self._hello_seconds, self._unanswered_since = _HELLO_SECONDS, math.inf
        self._connections = 1

    # ------------------------------------------------------------------------------------- for the training thread
    def start(self) -> None:
        """Start connecting."""
        self._thread.start()

    @span("wait")
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
        header = self._header(kind, sequence=sequence, reply_to=reply_to, base_version=base_version)
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
            connection = self.attach(connect(self._uri, keys=self._connection_keys))
            try:
                while not self.finished:
                    self.step(connection, STEP_SECONDS)
                self._refusals.flush()
            finally:
                connection.close()
        except BaseException as error:
            self._inbox.put(error)

    @property
    def _connection_keys(self) -> ConnectionKeys:
        return ConnectionKeys.to_coordinator(self._identity, self._accepted)

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
            self._end_session(LogEvent.HEARTBEAT_MISSED)
        elif self._session is not None and now - self._beat_at > beat * LOST_BEATS:
            self._end_session(LogEvent.PROCESS_SUSPENDED)
        elif self._session is not None and connection.established() > self._connections:
            # To the coordinator a new connection is a new peer: the session ended with the old connection.
            self._end_session(LogEvent.RECONNECTED)
        if self._session is None:
            self._on_connection_refusal(connection.refusal())
            renewed = connection.established() > self._connections
            if self._initiated is None or renewed or now - self._hello_at > self._hello_seconds:
                self._say_hello(connection, now, renewed=renewed)
            if now - self._unanswered_since > _QUIET_SECONDS:
                self._report_once(inquiry.no_answer(self._uri, _QUIET_SECONDS))
                if minutes := int((now - self._unanswered_since) // 60):
                    after = "60 s" if minutes == 1 else f"{minutes} min"
                    self._report_once(f"still no answer from {self._uri} after {after}; it keeps trying")
        elif self._new_keys_due(self._session, now):
            self._ask_for_keys(connection, self._session)
        elif now - self._beat_at >= beat:
            self._beat_at = now
            self._send_sealed(connection, self._session, Message(self._header(Kind.HEARTBEAT)))

    def _new_keys_due(self, session: Session, now: float) -> bool:
        due = self._rekeying is None and key_agreement.rekey_due(session, self._options, now - self._keys_since)
        return due and self._rekeys.take(now)

    def _ask_for_keys(self, connection: Connection, session: Session) -> None:
        header = self._header(Kind.REKEY)
        sealed, self._rekeying = key_agreement.begin_rekey(self._identity, session, header)
        self._log.message("sent", Message(sealed.header), sealed.tag, sealed.size)
        if not connection.send(sealed.frames, timeout_s=STEP_SECONDS):
            self._end_session(LogEvent.QUEUE_FULL)

    def _header(self, kind: Kind, **numbers: Any) -> Header:
        name, now = self._identity.name, self._now()
        return Header(run=self._run, kind=kind, sender=name, receiver=COORDINATOR, sent_at=now, **numbers)

    def _on_new_keys(self, session: Session, opened: Opened, size: int) -> None:
        """Use the keys that the coordinator agreed to."""
        key = self._accepted.get(COORDINATOR)
        if self._rekeying is None or key is None:
            raise UnreadableError(opened.header, RemoteWireError(Reason.UNEXPECTED, "new keys that were not requested"))
        key_agreement.finish_rekey(self._rekeying, key, session, opened)
        self._log.message("received", Message(opened.header), opened.tag, size)
        self._rekeying, self._received_at = None, self._clock.stopwatch()
        self._keys_since = self._received_at

    def _say_hello(self, connection: Connection, now: float, *, renewed: bool) -> None:
        """Start a handshake; until the coordinator answers, it is repeated at increasing intervals.

        A connection without answers is replaced: it may be open although the coordinator is not at its other end.
        """
        if self._initiated is not None:
            self._earlier.append(self._initiated)
            self._hello_seconds = min(2 * self._hello_seconds, _LONGEST_HELLO_SECONDS)
        if isinstance(self._accepted, AcceptedKeys):
            self._accepted.refresh()  # the operator may have accepted a new key of the coordinator
        frames, self._initiated = initiate(self._identity, COORDINATOR, self._run, self._now(), options=self._options)
        changed = COORDINATOR in self._accepted and connection.use_keys(self._connection_keys)
        mute = now - self._unanswered_since > MUTE_SECONDS
        self._unanswered_since = min(self._unanswered_since, now)
        self._hello_at, self._connections = now, max(1, connection.established())
        self._log.handshake("sent", Kind.HELLO, COORDINATOR, sum(map(len, frames)))
        if changed or (mute and not renewed) or not connection.send(frames):
            self._connections = connection.established() + 1  # the new one
            connection.reconnect()
            connection.send(frames)

    def _report_once(self, line: str) -> None:
        """Pass a line to ``progress``, once until there is a session."""
        if line not in self._reported:
            self._reported.add(line)
            self._progress(f"{self._identity.name}: {line}")

    @span("send")
    def _send_sealed(self, connection: Connection, session: Session, message: Message) -> None:
        allowed = self._allowed(session, message)
        if allowed is None:
            return
        if allowed.header.kind in (Kind.REPLY, Kind.ERROR):
            self._log.sign(SignedAt.REPLY)
        message = replace(allowed, head=self._log.sent_head)
        sealed = seal_message(session, message, connection.room)
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
        self._end_session(LogEvent.QUEUE_FULL)

    def _allowed(self, session: Session, message: Message) -> Message | None:
        """The message, or what is sent instead if this side's policy forbids it; None sends nothing."""
        if self._forbidden is None:
            return message
        header, head = message.header, self._log.sent_head
        refusal = self._forbidden(message, session.sealed_size(replace(message, head=head)))
        if refusal is None:
            return message
        self._log.note(
            LogEvent.WITHHELD, kind=header.kind, sequence=header.sequence, rule=refusal.rule, withheld=refusal.withheld
        )
        if header.kind is Kind.HEARTBEAT:
            return None
        if header.kind in (Kind.STATEMENT, Kind.AGREEMENT):
            found, allowed = f"{refusal.withheld} ({refusal.rule})", "what this silo has to send before it can join"
            self._inbox.put(InputError("policy: forbids", found, allowed))
        return Message(replace(header, kind=Kind.ERROR), (refusal,))

    def _end_session(self, why: LogEvent) -> None:
        """End the session; the next step starts a new handshake, and the coordinator sends a pending task again."""
        self._log.note(why)
        self._session = self._initiated = self._rekeying = None

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
        size, frames, proven = 0, None, self._session.authentic if self._session else 0
        try:
            frames = connection.receive(wait_s)
            if frames is None:
                return False
            size = sum(frame.nbytes for frame in frames)
            if self._session is None:
                self._complete_handshake(connection, frames, size)
                return True
            opened = self._session.open(frames)
            if opened.header.kind is Kind.REKEYED:
                self._on_new_keys(self._session, opened, size)
                return True
            message, tag = decode_opened(opened), opened.tag
        except RemoteWireError as error:
            if frames is None or self._session is None or self._session.authentic == proven:
                # Neither the coordinator's key nor that of the session vouches for it.
                self._refusals.add(b"", error, size)
                return True
            self._log.refused(COORDINATOR, error.reason, error.detail, size)
            if isinstance(error, UnreadableError):
                self._report_unreadable(error)
            elif error.reason in (Reason.GAP, Reason.TAMPERED):  # lost, or its shared part was replaced
                self._end_session(LogEvent.MESSAGE_LOST)
            return True
        self._received_at = self._clock.stopwatch()
        self._log.message("received", message, tag, size)
        self._stopped = message.header.kind is Kind.STOP
        codes = [each.code for each in message.payloads if isinstance(each, Error)]
        if codes and codes[0] in _ENDS:  # an error is the only payload of its message
            event, what = _ENDS[codes[0]]
            if what:
                self._report_once(f"the coordinator at {self._uri} {what}")
            self._end_session(event)
        elif message.header.kind is not Kind.HEARTBEAT:
            self._deliver(message)
        return True

    def _report_unreadable(self, error: UnreadableError) -> None:
        """Answer an authentic but unreadable message with an error, or the coordinator would wait forever."""
        self._received_at = self._clock.stopwatch()
        header = error.header
        if header.kind in (Kind.TASK, Kind.SUM, Kind.EVALUATE):
            number, base = header.sequence, header.base_version
            answer = Error.saying("unreadable", f"{header.kind} {number}: {error.detail}")
            self.send(Kind.ERROR, (answer,), sequence=number, reply_to=number, base_version=base)

    def _complete_handshake(self, connection: Connection, frames: list[memoryview], size: int) -> None:
        if self._initiated is None:
            raise RemoteWireError(Reason.UNEXPECTED, "a frame before hello")
        # Read the clock first, so that a process suspended from here on notices that it has missed heartbeats.
        now = self._clock.stopwatch()
        try:
            ready, session = complete(self._initiated, self._accepted, frames, self._now())
        except HelloRefusedError as refusal:
            self._on_refusal(refusal)
            return
        except RemoteWireError as error:
            if any(answers(each, self._accepted, frames) for each in self._earlier):
                return  # the coordinator answered an earlier hello late
            if error.reason in (Reason.BAD_SIGNATURE, Reason.UNKNOWN_SENDER):
                self._report_foreign()
            if error.reason == Reason.WIRE_VERSION:
                self._on_refusal(HelloRefusedError(error.reason, error.detail))
            raise
        self._log.handshake("received", Kind.WELCOME, COORDINATOR, size)
        self._log.handshake("sent", Kind.READY, COORDINATOR, sum(memoryview(frame).nbytes for frame in ready))
        connection.send(ready)
        connection.keep()
        self._session, self._hello_seconds, self._unanswered_since = session, _HELLO_SECONDS, math.inf
        self._reported.clear()
        self._earlier.clear()
        self._received_at = self._beat_at = self._keys_since = now
        # A hello that was sent while the connection was broken is delivered, and answered, on the one made since.
        self._connections = max(self._connections, connection.established())
        if self.statement:
            self._send_sealed(connection, session, Message(self._header(Kind.STATEMENT), self.statement))

    def _on_connection_refusal(self, refusal: ConnectionRefusal | None) -> None:
        """Report that the connection is not admitted."""
        match refusal:
            case ConnectionRefusal.REFUSED:
                self._on_refusal(HelloRefusedError(Reason.UNKNOWN_SENDER, "this key is not accepted"))
            case ConnectionRefusal.FOREIGN:
                self._unanswered_since = math.inf
                self._report_foreign()

    def _report_foreign(self) -> None:
        self._report_once(inquiry.foreign_listener(self._uri, self._accepted))

    def _on_refusal(self, refusal: HelloRefusedError) -> None:
        """Report why the coordinator refuses the handshake; it is retried, as the operator may remove the cause."""
        self._unanswered_since = math.inf
        if self._ends_with_other_run and refusal.reason == Reason.WRONG_RUN:
            raise OtherRunError(f"the coordinator at {self._uri} has begun another run: {refusal.detail}")
        keys = self._comparison.keys(refusal) if self._comparison else ""
        facts: dict[str, Any] = {"keys": keys} if keys else {}
        self._log.note(LogEvent.HELLO_REFUSED, reason=refusal.reason, detail=refusal.detail, **facts)
        self._report_once(inquiry.refused_handshake(self._uri, self._identity, refusal, keys))
