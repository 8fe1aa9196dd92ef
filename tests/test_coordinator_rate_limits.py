"""An accepted but hostile peer costs the coordinator little: rate limits belong to keys, not to connections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator import handshakes
from coordinator import sessions as rosters
from coordinator.data_admission import SimulatedAdmission
from fedmq.wire.handshake import HelloRefusedError, complete, initiate
from fedmq.wire.key_agreement import begin_rekey, finish_rekey
from fedmq.wire.keys import Identity, load_accepted, load_identity
from fedmq.wire.limits import peer_rate_limits
from fedmq.wire.messages import ANY_RUN, COORDINATOR, Kind, Message, TaskInfo
from fedmq.wire.payloads import SiloMetrics
from tests.roster_ends import RUN, Ends, flat, header, roster_ends, sealed


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    for name, most in {"HELLOS": 6, "COPIES": 20, "REJECTIONS": 8}.items():
        monkeypatch.setattr(handshakes, name, most)
    monkeypatch.setattr(rosters, "MESSAGES", 12)
    with roster_ends(tmp_path) as made:
        yield made


def test_a_key_of_another_name_than_the_runs_peers_opens_no_session(tmp_path: Path) -> None:
    with roster_ends(tmp_path, names=("silo-00",)) as ends:
        connection = ends.connect()
        hello, initiated = initiate(load_identity(ends.keys, "silo-01"), COORDINATOR, RUN, 0.0)
        for _ in range(2):
            answer = ends.passes(connection, hello)
            assert answer is not None
            with pytest.raises(HelloRefusedError, match="silo-01 is not a silo of this scenario"):
                complete(initiated, load_accepted(ends.keys), answer, 0.0)
        assert ends.roster.refused["unexpected"] == 2
        assert ends.session("silo-00", connection) is not None
        connection.close()


@pytest.mark.parametrize("kind", [Kind.REPLY, Kind.SILO_RESULT, Kind.TASK])
def test_a_peer_that_has_not_stated_its_data_can_send_no_work(kind: Kind, tmp_path: Path) -> None:
    """Such a reply used to reach the rounds, and ended the coordinator if its sender was no silo of the run."""
    with roster_ends(tmp_path, admission=SimulatedAdmission("0" * 64, RUN)) as ends:
        connection = ends.connect()
        session = ends.joined(connection)
        info = TaskInfo(round=1, rounds=2, committed=0, learning_rate=0.1) if kind is Kind.TASK else None
        payloads = (SiloMetrics(1, {"mean_r1": 0.5}),) if kind is Kind.SILO_RESULT else ()
        assert ends.take(connection, sealed(session, header(session, kind, reply_to=5), payloads, info)) is None
        assert ends.roster.refusal == f"silo-00: a {kind} of silo-00, which has not joined"
        beat = sealed(session, header(session, Kind.HEARTBEAT))
        assert ends.passes(connection, beat) is not None, "the session continues"
        connection.close()


def test_a_peer_that_connects_again_and_again_gets_a_bounded_number_of_sessions(ends: Ends) -> None:
    made = [ends.session("silo-00", connection) for connection in ends.opened(handshakes.HELLOS + 5)]
    assert sum(session is not None for session in made) == handshakes.HELLOS
    size = ends.log.stat().st_size
    for connection in ends.opened(1):
        for _ in range(30):
            assert ends.session("silo-00", connection) is None
    assert ends.log.stat().st_size - size < 10_000, "some refusals are counted, not logged"
    assert ends.roster.refused["too_often"] == 35
    (other,) = (ends.session("silo-01", connection) for connection in ends.opened(1))
    assert other is not None, "another peer is served"
    ends.clock.at += 3.0
    made = [ends.session("silo-00", connection) for connection in ends.opened(6)]
    assert sum(session is not None for session in made) == 3, "one more per second"


def test_neither_forged_nor_copied_hellos_use_up_the_rate_limit_of_a_peer(ends: Ends) -> None:
    stranger = Identity("silo-00", Ed25519PrivateKey.generate())
    hello, initiated = initiate(load_identity(ends.keys, "silo-00"), COORDINATOR, RUN, 0.0)
    for connection in ends.opened(handshakes.HELLOS + 5):
        assert ends.session("silo-00", connection, stranger) is None
        ends.passes(connection, hello)
    for connection in ends.opened(1):
        assert ends.completed(initiated, connection, ends.passes(connection, hello)) is not None
        assert ends.session("silo-00", connection) is not None
    assert ends.roster.refused["too_often"] == 0


def test_refusals_of_hellos_are_signed_a_bounded_number_of_times(ends: Ends) -> None:
    stranger = Identity("silo-00", Ed25519PrivateKey.generate())
    answers = []
    for connection in ends.opened(handshakes.REJECTIONS + 5):
        hello, _ = initiate(stranger, COORDINATOR, RUN, 0.0)
        answers.append(ends.passes(connection, hello))
    assert sum(answer is not None for answer in answers) == handshakes.REJECTIONS


def test_inquiries_do_not_use_up_the_handshakes_of_a_silo(ends: Ends) -> None:
    for connection in ends.opened(handshakes.HELLOS):
        hello, _ = initiate(load_identity(ends.keys, "silo-00"), COORDINATOR, ANY_RUN, 0.0)
        assert ends.passes(connection, hello) is not None
    (session,) = (ends.session("silo-00", connection) for connection in ends.opened(1))
    assert session is not None


@pytest.mark.parametrize("kind", [Kind.HEARTBEAT, Kind.REPLY])
def test_a_peer_that_sends_without_a_request_loses_its_session(kind: Kind, ends: Ends) -> None:
    for connection in ends.opened(1):
        session = ends.joined(connection)
        sent = 0
        for _ in range(3):
            while ends.roster.online("silo-00") and sent < 100:
                ends.passes(connection, sealed(session, header(session, kind, reply_to=1)))
                sent += 1
            session = ends.joined(connection)
        assert sent == rosters.MESSAGES + 3, "a new session has no new limit"
        assert ends.roster.refused["too_often"] == 3


def test_each_request_allows_an_answer(ends: Ends) -> None:
    for connection in ends.opened(1):
        session = ends.joined(connection)
        for number in range(1, 3 * rosters.MESSAGES):
            ends.roster.send("silo-00", Message(ends.roster.header("silo-00", Kind.EVALUATE, sequence=number)))
            reply = header(session, Kind.REPLY, sequence=number, reply_to=number)
            ends.passes(connection, sealed(session, reply))
        assert ends.roster.online("silo-00")
        assert ends.roster.refused["too_often"] == 0


def test_new_sessions_bring_no_new_requests_for_new_keys(ends: Ends) -> None:
    ends.roster._rekeys = peer_rate_limits(4)
    identity, answered = load_identity(ends.keys, "silo-00"), 0
    for connection in ends.opened(6):
        session = ends.joined(connection)
        asked, state = begin_rekey(identity, session, header(session, Kind.REKEY))
        frames = ends.passes(connection, flat(asked))
        assert frames is not None
        found = session.open(frames)
        if found.header.kind is Kind.REKEYED:
            finish_rekey(state, load_accepted(ends.keys)[COORDINATOR], session, found)
            answered += 1
    assert answered == 4
    assert ends.roster.refused["too_often"] == 2
