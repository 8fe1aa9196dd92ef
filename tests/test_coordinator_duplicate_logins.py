"""A second process with the key of a silo that takes part is refused, unless the first one is silent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.peers import Ready
from fedmq.wire.channel import BEAT_SECONDS, DISPLACED, LOST_BEATS
from fedmq.wire.messages import Kind, Message
from fedmq.wire.payloads import Error
from fedmq.wire.sessions import Session, open_message, seal_message
from fedmq.wire.transports.base import Connection
from tests.test_coordinator_rate_limits import Ends, flat, header, opened_ends
from tests.waiting import PATIENCE, wait_for

SILO = "silo-00"


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    yield from opened_ends(tmp_path)


def took(ends: Ends, connection: Connection, session: Session) -> object:
    """What the roster returns for a heartbeat of a process."""
    connection.send(flat(seal_message(session, Message(header(session, Kind.HEARTBEAT, 0)))))
    arrived = ends.listener.receive(PATIENCE)
    assert arrived is not None
    return ends.roster.take(*arrived)


def joined(ends: Ends, connection: Connection) -> Session:
    session = ends.session(SILO, connection)
    assert session is not None
    return session


def received(connection: Connection, session: Session) -> list[Message]:
    """The messages that wait for a process."""
    found = []
    while (frames := connection.receive(0.05)) is not None:
        found.append(open_message(session, frames)[0])
    return found


def test_the_first_process_keeps_its_place(ends: Ends) -> None:
    here, there = ends.connect(), ends.connect()
    first = joined(ends, here)
    ends.clock.at += BEAT_SECONDS
    second = joined(ends, there)
    assert [each.header.kind for each in received(here, first)] == [Kind.HEARTBEAT], "the coordinator's probe"
    for _ in range(LOST_BEATS):
        assert took(ends, here, first) is None  # it may have been in transit when the second session began
        assert not received(there, second)
        ends.clock.at += BEAT_SECONDS
    assert took(ends, here, first) is None
    (answer,) = received(there, second)
    assert [each.code for each in answer.payloads if isinstance(each, Error)] == [DISPLACED]
    assert ends.roster.refusal == "silo-00: started twice; the first process takes part"
    assert ends.roster.online(SILO) and not ends.roster.joining()
    for connection in (here, there):
        connection.close()


@pytest.mark.parametrize("lost", [False, True])
def test_a_new_process_joins_once_the_first_one_is_silent(ends: Ends, lost: bool) -> None:
    here, there = ends.connect(), ends.connect()
    joined(ends, here)
    second = joined(ends, there)
    assert ends.roster.joining() == {SILO: ends.clock.at}
    ends.clock.at += LOST_BEATS * BEAT_SECONDS + 0.1
    if lost:
        ends.roster.drop(SILO)
    assert took(ends, there, second) == Ready(SILO, returned=not lost)
    assert ends.roster.online(SILO) and not ends.roster.joining()
    ends.clock.at += BEAT_SECONDS
    assert took(ends, there, second) is None, "it joins once"
    for connection in (here, there):
        connection.close()


def test_the_successor_of_a_killed_process_joins_at_once(ends: Ends) -> None:
    here, there = ends.connect(), ends.connect()
    first = joined(ends, here)
    here.send(flat(seal_message(first, Message(header(first, Kind.HEARTBEAT, 0)))))
    arrived = ends.listener.receive(PATIENCE)
    assert arrived is not None
    ends.roster.take(*arrived)
    here.close()
    wait_for(lambda: not ends.listener.send(arrived[0], (b"is it", b"open?")))
    joined(ends, there)
    assert ends.roster.online(SILO) and not ends.roster.joining()
    there.close()
