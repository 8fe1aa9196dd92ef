"""One conformance test for every transport, and what each scheme refuses."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedmq.errors import InputError, LocalWireError, RemoteWireError
from fedmq.wire.handshake import complete, confirm, initiate, respond
from fedmq.wire.keys import Identity
from fedmq.wire.messages import Delta, Header, Kind, Message
from fedmq.wire.sessions import open_message, seal_message
from fedmq.wire.transports import zeromq
from fedmq.wire.transports.zeromq import Connection, Listener, connect, listen

SCHEMES = ("tcp", "ipc", "memory")
SOON = 5.0


@pytest.fixture(params=SCHEMES)
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {
        "tcp": "tcp://127.0.0.1:*",
        "ipc": f"ipc://{tmp_path}/socket",
        "memory": f"memory://{tmp_path.name}-{time.monotonic_ns()}",
    }[request.param]


@pytest.fixture
def listener(uri: str) -> Iterator[Listener]:
    made = listen(uri)
    yield made
    made.close()


@pytest.fixture
def dial(listener: Listener) -> Iterator[Callable[[], Connection]]:
    made: list[Connection] = []

    def one() -> Connection:
        made.append(connect(listener.uri))
        return made[-1]

    yield one
    for connection in made:
        connection.close()


def test_the_listener_says_where_it_is(listener: Listener, uri: str) -> None:
    assert "*" not in listener.uri
    assert listener.uri.partition("://")[0] == uri.partition("://")[0]


def test_messages_go_both_ways_in_order(listener: Listener, dial: Callable[[], Connection]) -> None:
    connection = dial()
    for number in range(20):
        assert connection.send([b"head", bytes([number])])
    for number in range(20):
        got = listener.receive(SOON)
        assert got is not None
        peer, frames = got
        assert [bytes(frame) for frame in frames] == [b"head", bytes([number])]
        assert listener.send(peer, [b"back", bytes([number])])
    for number in range(20):
        answer = connection.receive(SOON)
        assert answer is not None
        assert [bytes(frame) for frame in answer] == [b"back", bytes([number])]


def test_each_peer_gets_its_own_answers(listener: Listener, dial: Callable[[], Connection]) -> None:
    connections = [dial() for _ in range(5)]
    for number, connection in enumerate(connections):
        connection.send([b"", bytes([number])])
    for _ in connections:
        got = listener.receive(SOON)
        assert got is not None
        listener.send(got[0], [b"", got[1][1]])
    for number, connection in enumerate(connections):
        answer = connection.receive(SOON)
        assert answer is not None
        assert bytes(answer[1]) == bytes([number])


def test_a_large_body_arrives_whole(listener: Listener, dial: Callable[[], Connection]) -> None:
    body = np.random.default_rng(0).integers(0, 256, 5_000_000, dtype=np.uint8)
    assert dial().send([b"head", body.data])
    got = listener.receive(SOON)
    assert got is not None
    assert np.array_equal(np.frombuffer(got[1][1], np.uint8), body)


def test_a_handshake_and_sealed_messages_travel_on_it(listener: Listener, dial: Callable[[], Connection]) -> None:
    silo_id, coordinator_id = (Identity(name, Ed25519PrivateKey.generate()) for name in ("silo-00", "coordinator"))
    keys = {each.name: each.key.public_key() for each in (silo_id, coordinator_id)}
    connection = dial()

    hello, initiated = initiate(silo_id, "coordinator", "run", 0.0)
    connection.send(hello)
    peer, frames = received(listener)
    welcome, responded = respond(coordinator_id, keys, "run", frames, 0.0)
    listener.send(peer, welcome)
    answer = connection.receive(SOON)
    assert answer is not None
    ready, silo = complete(initiated, keys, answer, 0.0)
    connection.send(ready)
    coordinator = confirm(responded, received(listener)[1])

    delta = Delta("0" * 64, np.random.default_rng(0).standard_normal(100_000).astype(np.float32), 7)
    for sequence in range(3):
        header = Header(
            run="run",
            kind=Kind.REPLY,
            sender="silo-00",
            receiver="coordinator",
            sequence=sequence,
            reply_to=1,
            sent_at=0.0,
        )
        sealed = seal_message(silo, Message(header, (delta,)))
        connection.send(sealed.frames)
        message, tag = open_message(coordinator, received(listener)[1])
        assert tag == sealed.tag
        got = message.payloads[0]
        assert isinstance(got, Delta)
        assert np.array_equal(got.buffer, delta.buffer)


def received(listener: Listener) -> tuple[bytes, list[memoryview]]:
    got = listener.receive(SOON)
    assert got is not None
    return got


def test_waiting_ends(listener: Listener, dial: Callable[[], Connection]) -> None:
    connection = dial()
    start = time.monotonic()
    assert listener.receive(0) is None
    assert listener.receive(0.05) is None
    assert connection.receive(0) is None
    assert connection.receive(0.05) is None
    assert 0.09 < time.monotonic() - start < SOON


def test_a_message_of_the_wrong_number_of_frames_is_refused_and_the_next_is_read(
    listener: Listener, dial: Callable[[], Connection]
) -> None:
    connection = dial()
    for frames in ([b"one"], [b"one", b"two", b"three"], [b"one"] * 50):
        connection.socket.send_multipart(frames)
        with pytest.raises(RemoteWireError) as caught:
            listener.receive(SOON)
        assert caught.value.reason == "malformed"
    connection.send([b"head", b"body"])
    got = listener.receive(SOON)
    assert got is not None
    listener.socket.send_multipart([got[0], b"one"])
    with pytest.raises(RemoteWireError):
        connection.receive(SOON)


def test_we_send_two_frames_and_no_other_number(listener: Listener, dial: Callable[[], Connection]) -> None:
    connection = dial()
    for frames in ([], [b"one"], [b"one", b"two", b"three"]):
        with pytest.raises(LocalWireError):
            connection.send(frames)
        with pytest.raises(LocalWireError):
            listener.send(b"peer", frames)


def test_sending_to_a_peer_that_never_was_is_noticed(listener: Listener) -> None:
    assert listener.send(b"nobody", [b"head", b"body"]) is False


def test_sending_to_a_peer_that_left_is_noticed(listener: Listener, dial: Callable[[], Connection]) -> None:
    connection = dial()
    connection.send([b"head", b"body"])
    got = listener.receive(SOON)
    assert got is not None
    connection.close()
    deadline = time.monotonic() + SOON
    while listener.send(got[0], [b"head", b"body"]):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_closing_twice_is_allowed(uri: str) -> None:
    listener = listen(uri)
    connection = connect(listener.uri)
    for each in (connection, connection, listener, listener):
        each.close()


def test_a_connection_may_come_before_its_listener(tmp_path: Path) -> None:
    uri = f"ipc://{tmp_path}/later"
    connection = connect(uri)
    connection.send([b"head", b"body"])
    listener = listen(uri)
    assert listener.receive(SOON) is not None
    connection.close()
    listener.close()


def test_a_full_queue_is_noticed_and_does_not_grow(uri: str) -> None:
    listener = listen(uri, queue=2)
    connection = connect(listener.uri, queue=2)
    body = bytes(1 << 20)
    sent = 0
    while connection.send([b"head", body], 0.05):
        sent += 1
        assert sent < 100
    received = 0
    while listener.receive(0.2) is not None:
        received += 1
    assert received == sent
    connection.close()
    listener.close()


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_an_oversized_frame_never_arrives_and_others_do(scheme: str, tmp_path: Path) -> None:
    listener = listen({"tcp": "tcp://127.0.0.1:*", "ipc": f"ipc://{tmp_path}/socket"}[scheme], max_frame=10_000)
    bad, good = connect(listener.uri), connect(listener.uri)
    bad.send([b"head", bytes(10_001)])
    assert listener.receive(0.2) is None
    good.send([b"head", bytes(10_000)])
    assert listener.receive(SOON) is not None
    for each in (bad, good, listener):
        each.close()


def test_an_own_frame_above_the_limit_is_our_own_fault(
    listener: Listener, dial: Callable[[], Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeromq, "MAX_FRAME", 10)
    with pytest.raises(LocalWireError):
        dial().send([b"head", bytes(11)])


def test_a_connection_comes_back_by_itself_and_says_so() -> None:
    listener = listen("tcp://127.0.0.1:*")
    uri = listener.uri
    connection = connect(uri)
    connection.send([b"head", b"1"])
    first = listener.receive(SOON)
    assert first is not None
    assert connection.established() == 1
    listener.close()
    listener = listen(uri)
    deadline = time.monotonic() + SOON
    while connection.established() == 1:
        assert time.monotonic() < deadline
        connection.receive(0.02)
    connection.send([b"head", b"2"])
    second = listener.receive(SOON)
    assert second is not None
    assert bytes(second[1][1]) == b"2"
    assert listener.send(first[0], [b"head", b"body"]) is False
    connection.close()
    listener.close()


def test_rubbish_on_the_port_does_no_harm() -> None:
    listener = listen("tcp://127.0.0.1:*")
    host, port = listener.uri.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        assert listener.receive(0.1) is None
    connection = connect(listener.uri)
    connection.send([b"head", b"body"])
    assert listener.receive(SOON) is not None
    connection.close()
    listener.close()


def _child(uri: str) -> None:
    connection = connect(uri)
    got = None
    if connection.send([b"head", b"from the child"]):
        got = connection.receive(SOON)
    connection.close()
    raise SystemExit(0 if got is not None and bytes(got[1]) == b"to the child" else 1)


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_another_process_connects(scheme: str, tmp_path: Path) -> None:
    listener = listen({"tcp": "tcp://127.0.0.1:*", "ipc": f"ipc://{tmp_path}/socket"}[scheme])
    process = multiprocessing.get_context("forkserver").Process(target=_child, args=(listener.uri,))
    process.start()
    got = listener.receive(20)
    assert got is not None
    listener.send(got[0], [b"head", b"to the child"])
    process.join(20)
    assert process.exitcode == 0
    listener.close()


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "tcp",
        "tcp://",
        "tcp://host",
        "tcp://host:99999",
        "tcp://host:port",
        "tcp://ho st:80",
        "tcp://a:1;tcp://b:2",
        "udp://127.0.0.1:5",
        "inproc://x",
        "http://x:80",
        "ipc://",
        "ipc://" + "a" * 108,
        "memory://",
        "memory://a b",
    ],
)
def test_bad_uris_are_bad_input(bad: str) -> None:
    for make in (listen, connect):
        with pytest.raises(InputError):
            make(bad)


@pytest.mark.parametrize("bad", ["tcp://*:5000", "tcp://127.0.0.1:*", "tcp://127.0.0.1:0"])
def test_one_cannot_connect_to_a_star(bad: str) -> None:
    with pytest.raises(InputError):
        connect(bad)


def test_an_address_in_use_or_foreign_is_bad_input(tmp_path: Path) -> None:
    listener = listen("tcp://127.0.0.1:*")
    for bad in (listener.uri, "tcp://192.0.2.1:5000", f"ipc://{tmp_path}/no/such/folder"):
        with pytest.raises(InputError, match=bad.partition("://")[2].split(":")[0]):
            listen(bad)
    listener.close()


def test_a_path_in_use_is_bad_input_and_one_left_behind_is_not(tmp_path: Path) -> None:
    uri = f"ipc://{tmp_path}/socket"
    listener = listen(uri)
    with pytest.raises(InputError, match="another process listens"):
        listen(uri)
    connection = connect(uri)
    connection.send([b"head", b"body"])
    assert listener.receive(SOON) is not None
    connection.close()
    listener.close()
    with socket.socket(socket.AF_UNIX) as left:  # a listener that was killed leaves its file behind
        (tmp_path / "socket").unlink(missing_ok=True)
        left.bind(f"{tmp_path}/socket")
    listen(uri).close()


def test_an_ipv6_address_is_taken() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        listener = listen("tcp://[::1]:*")
    except InputError:
        pytest.skip("no IPv6 loopback here")
    connection = connect(listener.uri)
    connection.send([b"head", b"body"])
    assert listener.receive(SOON) is not None
    connection.close()
    listener.close()


def test_importing_the_module_makes_no_context() -> None:
    assert not any(name for name, value in vars(zeromq).items() if type(value).__name__ in ("Context", "Socket"))
