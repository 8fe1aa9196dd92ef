"""A coordinator's roster over memory://, with the keys of two silos that a test plays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.sessions import Roster
from fedmq.clock import WallClock
from fedmq.errors import RemoteWireError
from fedmq.wire.handshake import Initiated, complete, initiate
from fedmq.wire.keys import Identity, init_keys, load_accepted, load_identity
from fedmq.wire.log_records import LogRecord, read_log
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import COORDINATOR, Header, Kind, Message
from fedmq.wire.sessions import Sealed, Session, open_message, seal_message
from fedmq.wire.transports.base import Connection, Listener
from fedmq.wire.transports.registry import connect, listen
from tests.waiting import PATIENCE, memory_uri

RUN = "ends-0-0123456789ab"


class Jumping(WallClock):
    """A clock that stands still, but for jumps."""

    at = 100.0

    def stopwatch(self) -> float:
        return self.at


@dataclass
class Ends:
    """The coordinator's end, with the keys of two silos."""

    listener: Listener
    roster: Roster
    keys: Path
    clock: Jumping
    log: Path
    ready: tuple[bytes, ...] = ()  # the frames of the last ready

    def take(self, connection: Connection, frames: tuple[bytes, ...]) -> object:
        """Send frames to the coordinator; returns what its roster makes of them."""
        connection.send(frames)
        arrived = self.listener.receive(PATIENCE)
        assert arrived is not None
        return self.roster.take(*arrived)

    def beat(self, connection: Connection, session: Session) -> object:
        """Send a heartbeat; returns what the roster makes of it."""
        return self.take(connection, sealed(session, header(session, Kind.HEARTBEAT, 0)))

    def passes(self, connection: Connection, frames: tuple[bytes, ...]) -> list[memoryview] | None:
        """Send frames to the coordinator; returns its answer, if there is one."""
        self.take(connection, frames)
        return connection.receive(0.05)

    def session(self, name: str, connection: Connection, key: Identity | None = None) -> Session | None:
        """A new session of a silo; None if the hello is not answered."""
        own = key or load_identity(self.keys, name)
        hello, initiated = initiate(own, COORDINATOR, RUN, 0.0)
        return self.completed(initiated, connection, self.passes(connection, hello))

    def completed(
        self, initiated: Initiated, connection: Connection, answer: list[memoryview] | None
    ) -> Session | None:
        """The session that an answer to a hello opens; None if it opens none."""
        if answer is None:
            return None
        try:
            ready, session = complete(initiated, load_accepted(self.keys), answer, 0.0)
        except RemoteWireError:
            return None
        self.ready = tuple(map(bytes, ready))
        self.passes(connection, self.ready)
        return session

    def joined(self, connection: Connection, name: str = "silo-00") -> Session:
        """A new session of a silo whose hello is answered."""
        session = self.session(name, connection)
        assert session is not None
        return session

    def connect(self) -> Connection:
        return connect(self.listener.uri)

    def opened(self, count: int) -> Iterator[Connection]:
        """Open ``count`` connections, each after the one before is closed."""
        for _ in range(count):
            connection = self.connect()
            yield connection
            connection.close()

    def records(self) -> list[LogRecord]:
        """What the coordinator has logged."""
        return [record for _, record in read_log(self.log) if record is not None]


@contextlib.contextmanager
def roster_ends(folder: Path, keys: Path | None = None, **options: Any) -> Iterator[Ends]:
    """Both ends; the log is in the folder, and so are the keys, unless given."""
    clock, log = Jumping(), folder / "coordinator.jsonl"
    if keys is None:
        keys = folder / "keys"
        init_keys(keys, (COORDINATOR, "silo-00", "silo-01"))
    listener, identity = listen(memory_uri()), load_identity(keys, COORDINATOR)
    with MessageLog(log, COORDINATOR, clock) as written:
        roster = Roster(listener, identity, load_accepted(keys), RUN, written, clock, max_body=1 << 20, **options)
        yield Ends(listener, roster, keys, clock, log)
    listener.close()


def header(session: Session, kind: Kind, sequence: int = 1, reply_to: int | None = None) -> Header:
    return Header(
        run=RUN, kind=kind, sender=session.name, receiver=COORDINATOR, sequence=sequence, sent_at=0.0, reply_to=reply_to
    )


def flat(message: Sealed) -> tuple[bytes, ...]:
    return tuple(map(bytes, message.frames))


def sealed(session: Session, head: Header, *parts: Any) -> tuple[bytes, ...]:
    """The frames of a message: its header, payloads and facts of a task."""
    return flat(seal_message(session, Message(head, *parts)))


def received(connection: Connection, session: Session) -> list[Message]:
    """The messages that wait for a process."""
    found = []
    while (frames := connection.receive(0.05)) is not None:
        found.append(open_message(session, frames)[0])
    return found
