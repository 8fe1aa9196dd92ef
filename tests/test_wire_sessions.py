"""Keys on disk, the handshake, and sessions that refuse everything but the peer's next message."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedmq.errors import InputError, LocalWireError, RemoteWireError, RunError
from fedmq.wire import handshake, keys
from fedmq.wire import sessions as crypto
from fedmq.wire.codec import encode_header
from fedmq.wire.handshake import Initiated, Responded, complete, confirm, initiate, respond
from fedmq.wire.keys import Identity, fingerprint, init_keys, load_accepted, load_identity, revoke
from fedmq.wire.messages import Delta, Header, Kind, Loss, Message
from fedmq.wire.sessions import Sealed, Session, open_message, seal_message

RUN = "run-1"
NAMES = ("coordinator", "evaluator", "silo-00", "silo-01")


@pytest.fixture(scope="module")
def identities() -> dict[str, Identity]:
    return {name: Identity(name, Ed25519PrivateKey.generate()) for name in NAMES}


@pytest.fixture(scope="module")
def accepted(identities: dict[str, Identity]) -> dict[str, Ed25519PublicKey]:
    return {name: identity.key.public_key() for name, identity in identities.items()}


@pytest.fixture
def pair() -> tuple[Session, Session]:
    return sessions()


def sessions(name: bytes = b"s" * 16) -> tuple[Session, Session]:
    up, down = os.urandom(32), os.urandom(32)
    silo = Session(run=RUN, name="silo-00", peer="coordinator", session=name, send_key=up, receive_key=down)
    coordinator = Session(run=RUN, name="coordinator", peer="silo-00", session=name, send_key=down, receive_key=up)
    return silo, coordinator


def message(sequence: int = 1, **changes: Any) -> Message:
    values: dict[str, Any] = {
        "run": RUN,
        "kind": Kind.REPLY,
        "sender": "silo-00",
        "receiver": "coordinator",
        "sequence": sequence,
        "reply_to": 1,
        "sent_at": 2.0,
    }
    return Message(Header(**{**values, **changes}), (Loss(0.5),))


def reason(work: Any) -> str:
    with pytest.raises(RemoteWireError) as caught:
        work()
    return caught.value.reason


def flipped(raw: Any, bit: int) -> bytes:
    changed = bytearray(raw)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def assert_works(silo: Session, coordinator: Session) -> None:
    """Both directions carry a message."""
    sealed = seal_message(silo, message(77))
    assert open_message(coordinator, sealed.frames)[0].header.sequence == 77
    back = seal_message(coordinator, message(78, sender="coordinator", receiver="silo-00"))
    assert open_message(silo, back.frames)[0].header.sequence == 78


# Keys on disk


def test_keys_are_private_and_load_again(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    init_keys(directory, NAMES)
    for name in NAMES:
        assert (directory / f"{name}.key").stat().st_mode & 0o777 == 0o600
    keys = load_accepted(directory)
    assert sorted(keys) == sorted(NAMES)
    identity = load_identity(directory, "silo-00")
    assert identity.name == "silo-00"
    assert fingerprint(identity) == fingerprint(keys["silo-00"])
    assert len({fingerprint(key) for key in keys.values()}) == 4


def test_existing_keys_are_never_overwritten(tmp_path: Path) -> None:
    init_keys(tmp_path, ["silo-01"])
    before = (tmp_path / "silo-01.key").read_bytes()
    with pytest.raises(InputError, match=r"silo-01\.key"):
        init_keys(tmp_path, ["silo-00", "silo-01"])
    assert (tmp_path / "silo-01.key").read_bytes() == before
    assert not (tmp_path / "silo-00.key").exists()


def test_a_public_key_left_behind_stops_its_name_before_anything_is_written(tmp_path: Path) -> None:
    init_keys(tmp_path, ["silo-01"])
    (tmp_path / "silo-01.key").unlink()
    with pytest.raises(InputError, match=r"accepted/silo-01\.pub: found 'an existing key'"):
        init_keys(tmp_path, ["silo-00", "silo-01"])
    assert not list(tmp_path.glob("*.key"))


def test_keys_that_could_not_be_written_whole_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, count = os.fdopen, iter(range(9))

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, raw: bytes) -> None:
            self.file.write(raw[:10])
            raise OSError(errno.ENOSPC, "No space left on device")

    def full(descriptor: int, mode: str) -> Any:
        file = opened(descriptor, mode)
        return Full(file) if next(count) == 3 else file

    monkeypatch.setattr(keys.os, "fdopen", full)
    with pytest.raises(RunError, match="No space left"):
        init_keys(tmp_path, ["silo-00", "silo-01"])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    monkeypatch.undo()
    init_keys(tmp_path, ["silo-00", "silo-01"])
    assert set(load_accepted(tmp_path)) == {"silo-00", "silo-01"}


def test_a_key_that_somebody_else_makes_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path.suffix not in (".key", ".pub") and exists(path))
    (tmp_path / "silo-01.key").write_text("another's")
    with pytest.raises(InputError, match=r"silo-01\.key: found 'an existing key'"):
        init_keys(tmp_path, ["silo-00", "silo-01"])
    assert (tmp_path / "silo-01.key").read_text() == "another's"
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["silo-01.key"]


def test_a_key_that_cannot_be_moved_is_one_line(tmp_path: Path) -> None:
    init_keys(tmp_path, ["silo-01"])
    (tmp_path / "revoked").write_text("in the way")
    with pytest.raises(InputError, match="a folder that can be written"):
        revoke(tmp_path, "silo-01")
    assert "silo-01" in load_accepted(tmp_path)


def test_a_revoked_key_is_accepted_no_longer_but_stays_on_record(tmp_path: Path) -> None:
    init_keys(tmp_path, NAMES)
    print_before = fingerprint(load_accepted(tmp_path)["silo-00"])
    revoke(tmp_path, "silo-00")
    assert "silo-00" not in load_accepted(tmp_path)
    assert [path.name for path in (tmp_path / "revoked").iterdir()] == [f"silo-00-{print_before[:16]}.pub"]
    with pytest.raises(InputError, match="silo-00"):
        revoke(tmp_path, "silo-00")


@pytest.mark.parametrize("names", [["../evil"], ["Silo"], ["a", "a"], [""]])
def test_bad_names_for_keys_are_bad_input(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(InputError):
        init_keys(tmp_path, names)
    assert not list(tmp_path.rglob("*.key"))


def test_bad_private_keys_are_bad_input(tmp_path: Path) -> None:
    init_keys(tmp_path, ["silo-00"])
    path = tmp_path / "silo-00.key"
    with pytest.raises(InputError, match=r"silo-09\.key"):
        load_identity(tmp_path, "silo-09")
    path.chmod(0o644)
    with pytest.raises(InputError, match="0600"):
        load_identity(tmp_path, "silo-00")
    path.chmod(0o600)
    path.write_bytes(b"not a key")
    with pytest.raises(InputError, match=r"silo-00\.key"):
        load_identity(tmp_path, "silo-00")
    other = X25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(other)
    with pytest.raises(InputError, match="Ed25519"):
        load_identity(tmp_path, "silo-00")


def test_bad_public_keys_are_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="accepted"):
        load_accepted(tmp_path)
    init_keys(tmp_path, ["silo-00"])
    path = tmp_path / "accepted" / "silo-00.pub"
    (tmp_path / "accepted" / "silo-01.pub").write_bytes(path.read_bytes())
    with pytest.raises(InputError, match="the same key as silo-00"):
        load_accepted(tmp_path)
    (tmp_path / "accepted" / "silo-01.pub").unlink()
    path.write_bytes(b"x")
    with pytest.raises(InputError, match=r"silo-00\.pub"):
        load_accepted(tmp_path)


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


def test_two_handshakes_share_nothing(exchange: Exchange) -> None:
    made = []
    for _ in range(2):
        hello, initiated = exchange.hello()
        welcome, responded = exchange.welcome(hello)
        ready, silo = exchange.ready(initiated, welcome)
        made.append((silo, confirm(responded, ready)))
    (silo, _), (_, other_coordinator) = made
    assert silo.session != other_coordinator.session
    assert reason(lambda: other_coordinator.open(seal_message(silo, message()).frames)) == "unknown_session"


def test_an_unknown_sender_is_refused(exchange: Exchange, accepted: dict[str, Ed25519PublicKey]) -> None:
    hello, initiated = exchange.hello()
    without = {name: key for name, key in accepted.items() if name != "silo-00"}
    assert reason(lambda: exchange.welcome(hello, without)) == "unknown_sender"
    welcome, _ = exchange.welcome(hello)
    assert reason(lambda: exchange.ready(initiated, welcome, {})) == "unknown_sender"


def test_a_wrong_key_is_refused(exchange: Exchange, accepted: dict[str, Ed25519PublicKey]) -> None:
    swapped = {**accepted, "silo-00": accepted["silo-01"], "coordinator": accepted["evaluator"]}
    hello, initiated = exchange.hello()
    assert reason(lambda: exchange.welcome(hello, swapped)) == "bad_signature"
    welcome, _ = exchange.welcome(hello)
    assert reason(lambda: exchange.ready(initiated, welcome, swapped)) == "bad_signature"


def test_a_silo_cannot_speak_as_another(exchange: Exchange, identities: dict[str, Identity]) -> None:
    hello, _ = initiate(Identity("silo-01", identities["silo-00"].key), "coordinator", RUN, 0.0)
    assert reason(lambda: exchange.welcome(hello)) == "bad_signature"


def test_a_silo_cannot_pose_as_the_coordinator(exchange: Exchange, identities: dict[str, Identity]) -> None:
    hello, initiated = exchange.hello()
    asked_of_silo, _ = initiate(identities["silo-00"], "silo-01", RUN, 0.0)
    welcome, _ = respond(identities["silo-01"], exchange.accepted, RUN, asked_of_silo, 0.0)
    assert reason(lambda: exchange.ready(initiated, welcome)) == "unknown_sender"
    assert hello != asked_of_silo


def test_a_wrong_run_or_receiver_is_refused(exchange: Exchange) -> None:
    hello, _ = exchange.hello(run="run-2")
    assert reason(lambda: exchange.welcome(hello)) == "wrong_run"
    hello, _ = exchange.hello(to="evaluator")
    assert reason(lambda: exchange.welcome(hello)) == "wrong_receiver"
    hello, initiated = exchange.hello(run="run-2")
    welcome, _ = exchange.welcome(hello, run="run-2")
    _, other = exchange.hello()
    assert reason(lambda: exchange.ready(other, welcome)) == "wrong_run"
    assert exchange.ready(initiated, welcome)


def test_the_coordinator_does_not_greet_itself(exchange: Exchange) -> None:
    hello, _ = exchange.hello("coordinator")
    assert reason(lambda: exchange.welcome(hello)) == "unknown_sender"


def test_no_common_wire_version_is_refused_by_name(exchange: Exchange, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(handshake, "WIRE_VERSIONS", (7,))
        hello, _ = exchange.hello()
    with pytest.raises(RemoteWireError, match="wire version 7, spoken here: 1") as caught:
        exchange.welcome(hello)
    assert caught.value.reason == "wire_version"


def test_a_peer_that_speaks_more_versions_is_met_at_a_common_one(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(handshake, "WIRE_VERSIONS", (1, 2, 3))
        hello, initiated = exchange.hello()
    welcome, responded = exchange.welcome(hello)
    ready, silo = exchange.ready(initiated, welcome)
    assert silo.wire_version == 1
    assert_works(silo, confirm(responded, ready))


def test_versions_that_do_not_meet_are_refused_though_the_header_is_read(
    exchange: Exchange, identities: dict[str, Identity]
) -> None:
    hello, _ = exchange.hello()
    header = handshake.decode_header(hello[0])
    fields = msgpack.unpackb(hello[1][64:])
    forged = handshake._signed(
        identities["silo-00"], handshake.HELLO_LABEL, b"", header, {**fields, "versions": [8, 9]}
    )
    assert reason(lambda: exchange.welcome(forged)) == "wire_version"


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
    # None of the refusals spoilt the exchange.
    assert_works(silo, confirm(responded, ready))


def test_a_tampered_transcript_is_seen_by_the_other_side(exchange: Exchange) -> None:
    """A man in the middle with a key of its own cannot splice two honest handshakes."""
    first_hello, first = exchange.hello()
    second_hello, _ = exchange.hello()
    second_welcome, second_responded = exchange.welcome(second_hello)
    assert reason(lambda: exchange.ready(first, second_welcome)) == "bad_signature"
    first_welcome, _ = exchange.welcome(first_hello)
    ready, _ = exchange.ready(first, first_welcome)
    assert reason(lambda: confirm(second_responded, ready)) == "unknown_session"


def test_a_replayed_hello_gives_no_session(exchange: Exchange) -> None:
    hello, initiated = exchange.hello()
    welcome, responded = exchange.welcome(hello)
    ready, _ = exchange.ready(initiated, welcome)
    confirm(responded, ready)
    _, replayed = exchange.welcome(hello)
    assert reason(lambda: confirm(replayed, ready)) == "unknown_session"


def test_a_ready_counts_once(exchange: Exchange) -> None:
    hello, initiated = exchange.hello()
    welcome, responded = exchange.welcome(hello)
    ready, _ = exchange.ready(initiated, welcome)
    confirm(responded, ready)
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


def test_malformed_handshake_frames(exchange: Exchange, identities: dict[str, Identity]) -> None:
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


# Sessions


def test_sealed_frames_open_to_what_was_sealed(pair: tuple[Session, Session]) -> None:
    silo, coordinator = pair
    buffer = np.arange(100_000, dtype=np.float32)
    sent = Message(message().header, (Delta("0" * 64, buffer, 3), Loss(0.5)))
    sealed = seal_message(silo, sent)
    got, tag = open_message(coordinator, sealed.frames)
    assert tag == sealed.tag
    assert len(bytes.fromhex(tag)) == 16
    assert sealed.header == got.header
    assert (got.header.session, got.header.counter) == (b"s" * 16, 0)
    assert sealed.size == sum(memoryview(frame).nbytes for frame in sealed.frames)
    delta = got.payloads[0]
    assert isinstance(delta, Delta)
    assert delta.buffer.tobytes() == buffer.tobytes()
    assert delta.buffer.ctypes.data % 16 == 0
    assert not delta.buffer.flags.writeable


def test_the_cipher_is_plain_aes_gcm_over_the_joined_buffers() -> None:
    key = bytes(range(32))
    session = Session(
        run=RUN, name="silo-00", peer="coordinator", session=bytes(16), send_key=key, receive_key=bytes(32)
    )
    for counter, buffers in enumerate(([b"abc", bytes(100), b"", b"d" * 17], [], [b"x"])):
        clear, sealed = session.seal(message().header, buffers).frames
        nonce = bytes(4) + counter.to_bytes(8, "big")
        assert AESGCM(key).decrypt(nonce, bytes(sealed), bytes(clear)) == b"".join(buffers)


def test_a_replayed_message_is_refused_and_the_session_goes_on(pair: tuple[Session, Session]) -> None:
    silo, coordinator = pair
    sealed = seal_message(silo, message())
    open_message(coordinator, sealed.frames)
    assert reason(lambda: open_message(coordinator, sealed.frames)) == "replay"
    assert_works(silo, coordinator)


def test_a_gap_is_refused_once_and_the_session_goes_on(pair: tuple[Session, Session]) -> None:
    silo, coordinator = pair
    _lost, after = (seal_message(silo, message(number)) for number in range(2))
    assert reason(lambda: open_message(coordinator, after.frames)) == "gap"
    assert reason(lambda: open_message(coordinator, after.frames)) == "replay"
    assert_works(silo, coordinator)


def test_reordered_messages_are_refused_and_the_session_goes_on(pair: tuple[Session, Session]) -> None:
    silo, coordinator = pair
    first, second = (seal_message(silo, message(number)) for number in range(2))
    assert reason(lambda: open_message(coordinator, second.frames)) == "gap"
    assert reason(lambda: open_message(coordinator, first.frames)) == "replay"
    assert_works(silo, coordinator)


def test_a_forged_gap_changes_nothing(pair: tuple[Session, Session]) -> None:
    silo, coordinator = pair
    sealed = seal_message(silo, message())
    forged = encode_header(Header(**{**vars(sealed.header), "counter": 1000}))
    assert reason(lambda: coordinator.open((forged, sealed.frames[1]))) == "tampered"
    open_message(coordinator, sealed.frames)
    assert_works(silo, coordinator)


def test_a_message_does_not_open_on_the_side_that_sealed_it(pair: tuple[Session, Session]) -> None:
    silo, coordinator = pair
    sealed = seal_message(silo, message())
    assert reason(lambda: silo.open(sealed.frames)) == "unknown_sender"
    turned = encode_header(Header(**{**vars(sealed.header), "sender": "coordinator", "receiver": "silo-00"}))
    assert reason(lambda: silo.open((turned, sealed.frames[1]))) == "tampered"
    open_message(coordinator, sealed.frames)
    assert_works(silo, coordinator)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"run": "run-2"}, "wrong_run"),
        ({"session": b"t" * 16}, "unknown_session"),
        ({"session": b""}, "unknown_session"),
        ({"sender": "silo-01"}, "unknown_sender"),
        ({"receiver": "evaluator"}, "wrong_receiver"),
        ({"counter": 1 << 32}, "exhausted"),
        ({"wire_version": 2}, "wire_version"),
        ({"sequence": 9}, "tampered"),
        ({"kind": Kind.HEARTBEAT}, "tampered"),
        ({"base_version": 5}, "tampered"),
        ({"sent_at": 3.0}, "tampered"),
        ({"reply_to": 7}, "tampered"),
    ],
)
def test_a_changed_header_is_refused_and_the_session_goes_on(
    pair: tuple[Session, Session], changes: dict[str, Any], expected: str
) -> None:
    silo, coordinator = pair
    sealed = seal_message(silo, message())
    clear = encode_header(Header(**{**vars(sealed.header), **changes}))
    assert reason(lambda: coordinator.open((clear, sealed.frames[1]))) == expected
    open_message(coordinator, sealed.frames)
    assert_works(silo, coordinator)


def test_the_same_header_in_other_bytes_is_tampered(pair: tuple[Session, Session]) -> None:
    silo, coordinator = pair
    sealed = seal_message(silo, message())
    turned = dict(reversed(msgpack.unpackb(bytes(sealed.frames[0])).items()))
    assert reason(lambda: coordinator.open((msgpack.packb(turned), sealed.frames[1]))) == "tampered"
    open_message(coordinator, sealed.frames)


def test_truncated_frames_are_refused_and_the_session_goes_on(pair: tuple[Session, Session]) -> None:
    silo, coordinator = pair
    sealed = seal_message(silo, message())
    clear, body = (bytes(frame) for frame in sealed.frames)
    for size in range(len(body)):
        expected = "malformed" if size < 16 else "tampered"
        assert reason(lambda size=size: coordinator.open((clear, body[:size]))) == expected
    for size in range(len(clear)):
        assert reason(lambda size=size: coordinator.open((clear[:size], body))) == "malformed"
    for frames in ((), (clear,), (clear, body, b"")):
        assert reason(lambda frames=frames: coordinator.open(frames)) == "malformed"
    open_message(coordinator, sealed.frames)
    assert_works(silo, coordinator)


def test_an_oversized_body_is_refused_before_it_is_opened(pair: tuple[Session, Session]) -> None:
    silo, coordinator = pair
    sealed = seal_message(silo, message())
    assert reason(lambda: open_message(coordinator, sealed.frames, max_body=8)) == "oversized"
    open_message(coordinator, sealed.frames)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_flipped_bit_is_refused_and_the_session_goes_on(data: st.DataObject) -> None:
    silo, coordinator = sessions()
    sealed = seal_message(silo, message())
    frames = [bytes(frame) for frame in sealed.frames]
    which = data.draw(st.integers(0, 1))
    frames[which] = flipped(frames[which], data.draw(st.integers(0, len(frames[which]) * 8 - 1)))
    with pytest.raises(RemoteWireError):
        coordinator.open(frames)
    open_message(coordinator, sealed.frames)
    assert_works(silo, coordinator)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.binary(max_size=300), max_size=3))
def test_random_frames_are_refused(frames: list[bytes]) -> None:
    _, coordinator = sessions()
    with pytest.raises(RemoteWireError):
        coordinator.open(frames)


def test_an_authentic_message_that_does_not_decode_costs_itself_alone(pair: tuple[Session, Session]) -> None:
    silo, coordinator = pair
    rubbish = silo.seal(message().header, [b"rubbish"])
    assert reason(lambda: open_message(coordinator, rubbish.frames)) == "malformed"
    assert_works(silo, coordinator)


def test_handshake_kinds_stay_in_the_handshake(pair: tuple[Session, Session]) -> None:
    silo, coordinator = pair
    ready = Message(Header(**{**vars(message().header), "kind": Kind.READY}))
    with pytest.raises(LocalWireError):
        seal_message(silo, ready)
    assert reason(lambda: open_message(coordinator, silo.seal(ready.header, []).frames)) == "unexpected"


@pytest.mark.parametrize("changes", [{"run": "run-2"}, {"sender": "silo-01"}, {"receiver": "evaluator"}])
def test_we_do_not_seal_what_is_not_ours(pair: tuple[Session, Session], changes: dict[str, Any]) -> None:
    with pytest.raises(LocalWireError):
        seal_message(pair[0], message(**changes))
    assert pair[0].sent == 0


def test_a_key_seals_no_more_than_its_limit(pair: tuple[Session, Session], monkeypatch: pytest.MonkeyPatch) -> None:
    silo, coordinator = pair
    monkeypatch.setattr(crypto, "MAX_MESSAGES", 2)
    sealed: list[Sealed] = [seal_message(silo, message(number)) for number in range(2)]
    with pytest.raises(LocalWireError, match="2 messages"):
        seal_message(silo, message())
    for each in sealed:
        open_message(coordinator, each.frames)


def test_a_body_above_the_limit_is_our_own_fault(
    pair: tuple[Session, Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crypto, "MAX_BODY", 10)
    with pytest.raises(LocalWireError, match="allowed 10"):
        pair[0].seal(message().header, [bytes(11)])


def test_a_nonce_is_spent_even_if_sealing_fails(pair: tuple[Session, Session]) -> None:
    silo, _ = pair
    strided = memoryview(bytes(8))[::2]
    with pytest.raises(BufferError):
        silo.seal(message().header, [strided])
    assert silo.sent == 1


def test_a_session_needs_keys_of_the_right_length() -> None:
    with pytest.raises(LocalWireError):
        Session(run=RUN, name="a", peer="b", session=b"", send_key=bytes(32), receive_key=bytes(32))
    with pytest.raises(LocalWireError):
        Session(run=RUN, name="a", peer="b", session=bytes(16), send_key=bytes(16), receive_key=bytes(32))


def test_the_keys_depend_on_both_secrets_and_the_transcript() -> None:
    base = handshake.derive_keys(bytes(32), bytes(32), bytes(32))
    others = [
        handshake.derive_keys(b"1" * 32, bytes(32), bytes(32)),
        handshake.derive_keys(bytes(32), b"1" * 32, bytes(32)),
        handshake.derive_keys(bytes(32), bytes(32), b"1" * 32),
    ]
    parts = [part for made in (base, *others) for part in made]
    assert len(set(parts)) == len(parts)
