"""The handshake: both sides get the same session, or a reason for refusal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedmq.errors import RemoteWireError
from fedmq.wire import handshake
from fedmq.wire.handshake import HelloRefusedError, Initiated, Responded, complete, confirm, initiate, reject, respond
from fedmq.wire.keys import Identity
from fedmq.wire.messages import Header, Kind
from fedmq.wire.sessions import Session, seal_message
from tests.wire_examples import NAMES, RUN, assert_works, flipped, message, reason


@pytest.fixture(scope="module")
def identities() -> dict[str, Identity]:
    return {name: Identity(name, Ed25519PrivateKey.generate()) for name in NAMES}


@pytest.fixture(scope="module")
def accepted(identities: dict[str, Identity]) -> dict[str, Ed25519PublicKey]:
    return {name: identity.key.public_key() for name, identity in identities.items()}


# The handshake


class Exchange:
    """A handshake between silo-00 and the coordinator, step by step."""

    def __init__(self, identities: dict[str, Identity], accepted: dict[str, Ed25519PublicKey]) -> None:
        self.identities = identities
        self.accepted = accepted

    def hello(self, name: str = "silo-00", run: str = RUN, to: str = "coordinator") -> tuple[tuple, Initiated]:
        return initiate(self.identities[name], to, run, 0.0)

    def welcome(self, hello: Sequence[Any], accepted: Any = None, run: str = RUN) -> tuple[tuple, Responded]:
        keys = self.accepted if accepted is None else accepted
        return respond(self.identities["coordinator"], keys, run, hello, 0.0)

    def ready(self, state: Initiated, welcome: Sequence[Any], accepted: Any = None) -> tuple[tuple, Session]:
        return complete(state, self.accepted if accepted is None else accepted, welcome, 0.0)


@pytest.fixture
def exchange(identities: dict[str, Identity], accepted: dict[str, Ed25519PublicKey]) -> Exchange:
    return Exchange(identities, accepted)


def test_a_handshake_gives_both_sides_the_same_session(exchange: Exchange) -> None:
    hello, initiated = exchange.hello()
    welcome, responded = exchange.welcome(hello)
    ready, silo = exchange.ready(initiated, welcome)
    coordinator = confirm(responded, ready)
    assert silo.session == coordinator.session
    assert (silo.peer, coordinator.peer) == ("coordinator", "silo-00")
    assert (silo.sent, coordinator.received) == (1, 1)
    assert_works(silo, coordinator)


def test_two_handshakes_share_no_keys(exchange: Exchange) -> None:
    made = []
    for _ in range(2):
        hello, initiated = exchange.hello()
        welcome, responded = exchange.welcome(hello)
        ready, silo = exchange.ready(initiated, welcome)
        made.append((silo, confirm(responded, ready)))
    (silo, _), (_, other_coordinator) = made
    assert silo.session != other_coordinator.session
    assert reason(lambda: other_coordinator.open(seal_message(silo, message()).frames)) == "unknown_session"


def test_a_handshake_with_another_key_name_run_or_receiver_is_refused(
    exchange: Exchange, identities: dict[str, Identity], accepted: dict[str, Ed25519PublicKey]
) -> None:
    hello, initiated = exchange.hello()
    welcome, _ = exchange.welcome(hello)
    without = {name: key for name, key in accepted.items() if name != "silo-00"}
    swapped = {**accepted, "silo-00": accepted["silo-01"], "coordinator": accepted["evaluator"]}
    stolen, _ = initiate(Identity("silo-01", identities["silo-00"].key), "coordinator", RUN, 0.0)
    asked_of_silo, _ = initiate(identities["silo-00"], "silo-01", RUN, 0.0)
    by_silo, _ = respond(identities["silo-01"], accepted, RUN, asked_of_silo, 0.0)
    other_run, other_state = exchange.hello(run="run-2")
    other_welcome, _ = exchange.welcome(other_run, run="run-2")
    refusals: list[tuple[str, Callable[[], object]]] = [
        ("unknown_sender", lambda: exchange.welcome(hello, without)),
        ("unknown_sender", lambda: exchange.ready(initiated, welcome, {})),
        ("bad_signature", lambda: exchange.welcome(hello, swapped)),
        ("bad_signature", lambda: exchange.ready(initiated, welcome, swapped)),
        ("bad_signature", lambda: exchange.welcome(stolen)),
        ("unknown_sender", lambda: exchange.ready(initiated, by_silo)),
        ("wrong_run", lambda: exchange.welcome(other_run)),
        ("wrong_run", lambda: exchange.ready(initiated, other_welcome)),
        ("wrong_receiver", lambda: exchange.welcome(exchange.hello(to="evaluator")[0])),
        ("unknown_sender", lambda: exchange.welcome(exchange.hello("coordinator")[0])),
    ]
    for number, (expected, attempt) in enumerate(refusals):
        assert reason(attempt) == expected, number
    assert exchange.ready(other_state, other_welcome)


def test_another_wire_version_is_refused_by_name_and_the_peer_learns_it(
    exchange: Exchange, identities: dict[str, Identity], accepted: dict[str, Ed25519PublicKey]
) -> None:
    hello, initiated = exchange.hello()
    header = replace(handshake.decode_header(hello[0]), wire_version=7)
    foreign = handshake._signed(identities["silo-00"], handshake.HELLO_LABEL, b"", header, {"of": "the future"})
    with pytest.raises(RemoteWireError) as caught:
        respond(identities["coordinator"], accepted, header.run, foreign, 0.0, header=header)
    assert (caught.value.reason, caught.value.detail) == ("wire_version", "wire version 7, supported here: 1")
    assert reason(lambda: exchange.welcome(foreign)) == "wire_version"
    answer = reject(identities["coordinator"], {}, foreign, caught.value, 0.0)
    assert answer is not None
    # The other side's program reads the answer, whatever versions of their headers are.
    theirs = handshake._signed(
        identities["coordinator"],
        handshake.REJECT_LABEL,
        handshake.transcript_digest(*hello),
        replace(handshake.decode_header(answer[0]), wire_version=7),
        {"reason": "wire_version", "detail": "wire version 1, supported here: 7"},
    )
    with pytest.raises(HelloRefusedError, match="supported here: 7") as refused:
        complete(initiated, accepted, theirs, 0.0)
    assert refused.value.reason == "wire_version"


def test_any_flipped_bit_of_the_handshake_is_refused(exchange: Exchange) -> None:
    hello, initiated = exchange.hello()
    welcome, responded = exchange.welcome(hello)
    ready, silo = exchange.ready(initiated, welcome)
    rng = np.random.default_rng(0)
    for frames, step in (
        (hello, exchange.welcome),
        (welcome, lambda bad: exchange.ready(initiated, bad)),
        (ready, lambda bad: confirm(responded, bad)),
    ):
        for which in (0, 1):
            size = memoryview(frames[which]).nbytes * 8
            for bit in rng.integers(0, size, 60):
                bad = [bytes(frame) for frame in frames]
                bad[which] = flipped(bad[which], int(bit))
                with pytest.raises(RemoteWireError):
                    step(bad)
    # The exchange still completes after all refusals.
    assert_works(silo, confirm(responded, ready))


def test_a_tampered_transcript_is_detected_by_the_other_side(exchange: Exchange) -> None:
    """A man in the middle with its own key cannot splice two honest handshakes."""
    first_hello, first = exchange.hello()
    second_hello, _ = exchange.hello()
    second_welcome, second_responded = exchange.welcome(second_hello)
    assert reason(lambda: exchange.ready(first, second_welcome)) == "bad_signature"
    first_welcome, _ = exchange.welcome(first_hello)
    ready, _ = exchange.ready(first, first_welcome)
    assert reason(lambda: confirm(second_responded, ready)) == "unknown_session"


def test_a_hello_or_ready_counts_once(exchange: Exchange) -> None:
    hello, initiated = exchange.hello()
    welcome, responded = exchange.welcome(hello)
    ready, _ = exchange.ready(initiated, welcome)
    confirm(responded, ready)
    _, replayed = exchange.welcome(hello)
    assert reason(lambda: confirm(replayed, ready)) == "unknown_session"
    assert reason(lambda: confirm(responded, ready)) == "unexpected"


def test_handshake_messages_out_of_order_are_unexpected(exchange: Exchange) -> None:
    hello, initiated = exchange.hello()
    welcome, responded = exchange.welcome(hello)
    assert reason(lambda: exchange.welcome(welcome)) == "unexpected"
    assert reason(lambda: exchange.ready(initiated, hello)) == "unexpected"
    _, silo = exchange.ready(initiated, welcome)
    early = seal_message(silo, message())
    # The initiator's second message before its ready: a gap, as ready never came.
    assert reason(lambda: confirm(responded, early.frames)) == "gap"


def test_a_ready_without_the_right_signature_is_refused(exchange: Exchange) -> None:
    hello, initiated = exchange.hello()
    welcome, responded = exchange.welcome(hello)
    _, silo = exchange.ready(initiated, welcome)
    silo._next_sent = 0
    header = Header(
        run=RUN, kind=Kind.READY, sender="silo-00", receiver="coordinator", sequence=0, reply_to=0, sent_at=0.0
    )
    assert reason(lambda: confirm(responded, silo.seal(header, [bytes(64)]).frames)) == "bad_signature"


def test_malformed_handshake_frames_are_refused(exchange: Exchange, identities: dict[str, Identity]) -> None:
    hello, _ = exchange.hello()
    assert reason(lambda: exchange.welcome([hello[0]])) == "malformed"
    assert reason(lambda: exchange.welcome([*hello, b""])) == "malformed"
    assert reason(lambda: exchange.welcome([b"", b""])) == "malformed"
    assert reason(lambda: exchange.welcome([hello[0], bytes(5000)])) == "oversized"
    assert reason(lambda: exchange.welcome([hello[0], b""])) == "bad_signature"
    header = handshake.decode_header(hello[0])
    fields = msgpack.unpackb(hello[1][64:])
    for bad in (
        {**fields, "x25519": bytes(31)},
        {**fields, "x25519": bytes(32)},  # a point of low order: the shared secret would be zero
        {**fields, "mlkem768": b"\xff" * 1184},  # coefficients out of range
        {**fields, "nonce": "a" * 32},
        {**fields, "versions": []},
        {**fields, "versions": [True]},
        {**fields, "versions": 1},
        {**fields, "more": 1},
        {"nonce": fields["nonce"]},
    ):
        frames = handshake._signed(identities["silo-00"], handshake.HELLO_LABEL, b"", header, bad)
        assert reason(lambda frames=frames: exchange.welcome(frames)) == "malformed"
