"""A silo's or the evaluator's line to the coordinator, on a thread of its own.

The thread shakes hands, opens and seals, sends heartbeats, and shakes hands again when the coordinator went silent,
whatever the training thread is doing. The connection is made in the thread and never leaves it.
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
from fedmq.wire.log_records import NoteKind
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import COORDINATOR, Error, Header, Kind, Message, Payload, Reason
from fedmq.wire.sessions import Session, open_message, seal_message
from fedmq.wire.transports.base import Connection
from fedmq.wire.transports.registry import connect

BEAT_SECONDS = 2.0
#: Beats without a word after which a peer counts as lost.
LOST_BEATS = 2
#: The same of the coordinator, which answers only between merges; if its process dies, the connection says so.
_COORDINATOR_BEATS = 15
_HELLO_SECONDS = 2.0
#: Hellos without an answer after which the silo's own terminal is told, once until there is a session.
_PATIENT_HELLOS = 5
#: How long the thread waits before it looks at the clock again [s].
_TURN_SECONDS = 0.25
#: Messages taken in a turn: who floods the line must not keep this side from its beats.
_MESSAGES_AT_ONCE = 256
#: Turns after which a message that finds no room is given up, and the session with it.
_PATIENT_TURNS = int(BEAT_SECONDS / _TURN_SECONDS)


class Channel:
    """One authenticated line to the coordinator that mends itself.

    Args:
        uri: where the coordinator listens.
        identity: name and key of this process.
        accepted: public keys accepted here; the coordinator's must be among them.
        run: the run's name.
        log: the message log of this process; written by the link's thread only.
        clock: for liveness.
        now: the run's time as this process knows it [s].
        progress: told a line, from the link's thread, when nobody answers for a while. A coordinator that refuses a
            hello does not answer it: anybody may have sent it.
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
    ) -> None:
        self._progress, self._unanswered = progress, 0
        self._uri, self._identity, self._accepted, self._run = uri, identity, accepted, run
        self._log, self._clock, self._now = log, clock, now
        self._inbox: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._connection: Connection | None = None
        self._closing = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run_thread, name="link", daemon=True)

        self._session: Session | None = None
        self._initiated: Initiated | None = None
        self._heard = self._beat = self._asked = 0.0
        self._connections = 1

    # ------------------------------------------------------------------------------------- for the training thread
    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message from the coordinator, or None after ``timeout`` seconds.

        Raises:
            Exception: whatever ended the link's thread.
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
        """Queue a message; it leaves once there is a session."""
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

    def close(self, patience: float = 5.0) -> None:
        """Send what is queued, then end the thread, if it ever began; at most ``patience`` seconds."""
        self._closing.set()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(patience)
        self._log.close()

    def _wake(self) -> None:
        """Have the link's thread look at once at what there is to do; before it has a connection, it will anyway."""
        if self._connection is not None:
            self._connection.wake()

    # ---------------------------------------------------------------------------------------------- the link's thread
    def _run_thread(self) -> None:
        try:
            connection = self._connection = connect(self._uri)
            try:
                while not self._over:
                    self._turn(connection)
            finally:
                connection.close()
        except BaseException as error:
            self._inbox.put(error)

    @property
    def _over(self) -> bool:
        # After its stop the coordinator reads nothing more: what is still queued would reach nobody.
        return self._stopped or (self._closing.is_set() and (self._session is None or self._outbox.empty()))

    def _turn(self, connection: Connection) -> None:
        """Wait for whatever comes first, then do all there is to do."""
        self._keep_alive(connection, self._clock.stopwatch())
        self._take_all(connection, _TURN_SECONDS)
        while self._session is not None and not self._stopped and not self._outbox.empty():
            self._put(connection, self._session, self._outbox.get())

    def _keep_alive(self, connection: Connection, now: float) -> None:
        if self._session is not None and now - self._heard > BEAT_SECONDS * _COORDINATOR_BEATS:
            self._forget(NoteKind.COORDINATOR_SILENT)
        elif self._session is not None and now - self._beat > BEAT_SECONDS * LOST_BEATS:
            self._forget(NoteKind.STOOD_STILL)
        elif self._session is not None and connection.established() > self._connections:
            # A new connection is a new peer to the coordinator: the session went with the old one.
            self._forget(NoteKind.RECONNECTED)
        if self._session is None:
            if self._initiated is None or now - self._asked > _HELLO_SECONDS:
                frames, self._initiated = initiate(self._identity, COORDINATOR, self._run, self._now())
                self._asked, self._connections = now, max(1, connection.established())
                self._log.handshake("sent", Kind.HELLO, COORDINATOR, sum(map(len, frames)))
                connection.send(frames)
                self._tell_unanswered()
        elif now - self._beat >= BEAT_SECONDS:
            self._beat = now
            header = Header(
                run=self._run,
                kind=Kind.HEARTBEAT,
                sender=self._identity.name,
                receiver=COORDINATOR,
                sequence=0,
                sent_at=self._now(),
            )
            self._put(connection, self._session, Message(header))

    def _tell_unanswered(self) -> None:
        self._unanswered += 1
        if self._unanswered == _PATIENT_HELLOS + 1:
            self._progress(
                f"{self._identity.name}: no answer from {self._uri} for {_PATIENT_HELLOS * _HELLO_SECONDS:.0f} s: no "
                f"coordinator listens there yet, or it runs another scenario (here run {self._run}), or it does not "
                f"know this key of {self._identity.name}; its own message log says which"
            )

    def _put(self, connection: Connection, session: Session, message: Message) -> None:
        sealed = seal_message(session, message)
        # Logged before it leaves: a log may name a message that never left, never lack one that did.
        self._log.message("sent", replace(message, header=sealed.header), sealed.tag, sealed.size)
        for _ in range(_PATIENT_TURNS):
            if connection.send(sealed.frames, timeout_s=_TURN_SECONDS):
                return
            # One who waits to be heard still listens: there is no room either where the coordinator has just ended,
            # and its stop can be read by nobody once the session is forgotten.
            self._take_all(connection)
            if self._stopped or self._session is not session:
                return
        self._forget(NoteKind.QUEUE_FULL)

    def _forget(self, why: NoteKind) -> None:
        """Give the session up; the next turn shakes hands again, and an open task is handed out again."""
        self._log.note(why)
        self._session = self._initiated = None

    def _take_all(self, connection: Connection, wait_s: float = 0.0) -> None:
        """Take what has arrived, so much that there is time for the rest, too; wait for the first message at most so
        long [s], or until this thread is woken.
        """
        for _ in range(_MESSAGES_AT_ONCE):
            if not self._take(connection, wait_s):
                return
            wait_s = 0.0

    def _take(self, connection: Connection, wait_s: float) -> bool:
        """Take one message, if there is one and the last was no stop; returns whether there was."""
        if self._stopped:
            return False
        size, frames, proven = 0, None, self._session.received if self._session else 0
        try:
            frames = connection.receive(wait_s)
            if frames is None:
                return False
            size = sum(frame.nbytes for frame in frames)
            if self._session is None:
                self._welcome(connection, frames, size)
                return True
            message, tag = open_message(self._session, frames)
        except RemoteWireError as error:
            self._log.refused(COORDINATOR, error.reason, error.detail, size)
            if error.reason == Reason.GAP:
                self._forget(NoteKind.MESSAGE_LOST)
            elif frames is not None and self._session is not None and self._session.received > proven:
                self._unreadable(frames[0], error)
            return True
        self._heard = self._clock.stopwatch()
        self._log.message("received", message, tag, size)
        self._stopped = message.header.kind is Kind.STOP
        if message.header.kind is not Kind.HEARTBEAT:
            self._inbox.put(message)
        return True

    def _unreadable(self, clear: memoryview, error: RemoteWireError) -> None:
        """The coordinator's own message cannot be read: who waits for an answer is told, or would wait for ever."""
        self._heard = self._clock.stopwatch()
        header = decode_header(clear)
        if header.kind in (Kind.TASK, Kind.EVALUATE):
            number, base = header.sequence, header.base_version
            said = Error.saying("unreadable", f"{header.kind} {number}: {error.detail}")
            self.send(Kind.ERROR, (said,), sequence=number, reply_to=number, base_version=base)

    def _welcome(self, connection: Connection, frames: list[memoryview], size: int) -> None:
        if self._initiated is None:
            raise RemoteWireError(Reason.UNEXPECTED, "a frame before hello")
        # Taken first: whoever stands still from here on has not beaten since, and must notice.
        now = self._clock.stopwatch()
        ready, session = complete(self._initiated, self._accepted, frames, self._now())
        self._log.handshake("received", Kind.WELCOME, COORDINATOR, size)
        self._log.handshake("sent", Kind.READY, COORDINATOR, sum(memoryview(frame).nbytes for frame in ready))
        connection.send(ready)
        self._session, self._unanswered = session, 0
        self._heard = self._beat = now
