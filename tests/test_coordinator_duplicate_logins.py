"""Two sessions of one silo: a second process is refused unless the first is silent; a late one joins again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from coordinator.data_admission import SimulatedAdmission
from coordinator.peers import Ready
from fedmq.data.splits import SPLITS
from fedmq.wire.channel import BEAT_SECONDS, DISPLACED, LOST_BEATS
from fedmq.wire.handshake import initiate
from fedmq.wire.keys import load_identity
from fedmq.wire.messages import COORDINATOR, Kind
from fedmq.wire.payloads import DataStatement, Error
from fedmq.wire.sessions import Session
from tests.roster_ends import RUN, Ends, header, received, roster_ends, sealed
from tests.waiting import PATIENCE, wait_for

SILO = "silo-00"


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    with roster_ends(tmp_path) as made:
        yield made


def test_the_first_process_keeps_its_place(ends: Ends) -> None:
    here, there = ends.connect(), ends.connect()
    first = ends.joined(here)
    ends.clock.at += BEAT_SECONDS
    second = ends.joined(there)
    assert [each.header.kind for each in received(here, first)] == [Kind.HEARTBEAT], "the coordinator's probe"
    for _ in range(LOST_BEATS):
        assert ends.beat(here, first) is None  # it may have been in transit when the second session began
        assert not received(there, second)
        ends.clock.at += BEAT_SECONDS
    assert ends.beat(here, first) is None
    (answer,) = received(there, second)
    assert [each.code for each in answer.payloads if isinstance(each, Error)] == [DISPLACED]
    assert ends.roster.refusal == "silo-00: started twice; the first process takes part"
    assert ends.roster.online(SILO) and not ends.roster.joining()
    for connection in (here, there):
        connection.close()


@pytest.mark.parametrize("lost", [False, True])
def test_a_new_process_joins_once_the_first_one_is_silent(ends: Ends, lost: bool) -> None:
    here, there = ends.connect(), ends.connect()
    ends.joined(here)
    second = ends.joined(there)
    assert ends.roster.joining() == {SILO: ends.clock.at}
    ends.clock.at += LOST_BEATS * BEAT_SECONDS + 0.1
    if lost:
        ends.roster.drop(SILO)
    assert ends.beat(there, second) == Ready(SILO, returned=not lost)
    assert ends.roster.online(SILO) and not ends.roster.joining()
    ends.clock.at += BEAT_SECONDS
    assert ends.beat(there, second) is None, "it joins once"
    for connection in (here, there):
        connection.close()


@pytest.mark.parametrize("after", ["welcome", "ready"])
def test_a_session_that_is_lost_does_not_end_the_next_one_on_its_connection(tmp_path: Path, after: str) -> None:
    stated = DataStatement("a" * 64, 3, np.ones((len(SPLITS), 3), np.int64))
    with roster_ends(tmp_path, admission=SimulatedAdmission({SILO: stated}, RUN)) as ends:
        here = ends.connect()
        ends.take(here, statement(ends.joined(here), stated))
        assert ends.roster.online(SILO)
        hello, initiated = initiate(load_identity(ends.keys, SILO), COORDINATOR, RUN, 0.0)
        welcome = ends.passes(here, hello)
        if after == "welcome":
            ends.roster.drop(SILO)
        session = ends.completed(initiated, here, welcome)
        assert session is not None
        ends.roster.drop(SILO)
        ends.take(here, statement(session, stated))
        assert ends.roster.online(SILO) and not ends.roster.refused
        here.close()


def statement(session: Session, stated: DataStatement) -> tuple[bytes, ...]:
    return sealed(session, header(session, Kind.STATEMENT, 0), (stated,))


def test_the_successor_of_a_killed_process_joins_at_once(ends: Ends) -> None:
    here, there = ends.connect(), ends.connect()
    first = ends.joined(here)
    here.send(sealed(first, header(first, Kind.HEARTBEAT, 0)))
    arrived = ends.listener.receive(PATIENCE)
    assert arrived is not None
    ends.roster.take(*arrived)
    here.close()
    wait_for(lambda: not ends.listener.send(arrived[0], (b"is it", b"open?")))
    ends.joined(there)
    assert ends.roster.online(SILO) and not ends.roster.joining()
    there.close()
