"""A conformance test for every registered transport, and errors specific to each scheme."""

from __future__ import annotations

import importlib
import multiprocessing
import pkgutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import zmq
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedmq.errors import InputError, LocalWireError, RemoteWireError
from fedmq.wire import transports
from fedmq.wire.handshake import complete, confirm, initiate, respond
from fedmq.wire.keys import Identity
from fedmq.wire.messages import Header, Kind, Message
from fedmq.wire.payloads import Delta
from fedmq.wire.sessions import open_message, seal_message
from fedmq.wire.transports import base, memory, registry
from fedmq.wire.transports.base import Connection, Listener
from fedmq.wire.transports.registry import check_uri, connect, listen, register, schemes
from tests import queue_transport
from tests.waiting import memory_uri, wait_for

SOON = 100.0
#: For each scheme a function from the test's folder to a URI to listen on.
URIS: dict[str, Callable[[Path], str]] = {
    "tcp": lambda _: "tcp://127.0.0.1:*",
    "ipc": lambda folder: f"ipc://{folder}/socket",
    "memory": lambda _folder: memory_uri(),
    "queue": lambda folder: f"queue://{folder}",
    "shared+tcp": lambda _: "shared+tcp://127.0.0.1:*",
    "shared+ipc": lambda folder: f"shared+ipc://{folder}/socket",
}
#: Schemes over ZeroMQ between processes, where a peer may be any program.
BETWEEN_PROCESSES = ("tcp", "ipc")


@pytest.fixture(params=[*URIS])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return URIS[request.param](tmp_path)


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


def test_the_listener_reports_its_address(listener: Listener, uri: str) -> None:
    assert "*" not in listener.uri
    assert listener.uri.partition("://")[0] == uri.partition("://")[0]


def test_messages_are_delivered_both_ways_in_order(listener: Listener, dial: Callable[[], Connection]) -> None:
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


def test_a_handshake_and_sealed_messages_work_over_every_transport(
    listener: Listener, dial: Callable[[], Connection]
) -> None:
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


def test_receiving_times_out(listener: Listener, dial: Callable[[], Connection]) -> None:
    connection = dial()
    start = time.monotonic()
    assert listener.receive(0) is None
    assert listener.receive(0.05) is None
    assert connection.receive(0) is None
    assert connection.receive(0.05) is None
    assert 0.09 < time.monotonic() - start < SOON


def raw_socket(kind: int, uri: str) -> zmq.Socket[bytes]:
    """A raw ZeroMQ socket without this project's rules; unbound and unconnected."""
    context = memory.endpoint(uri).context if uri.startswith("memory:") else zmq.Context.instance()
    return context.socket(kind)


@pytest.mark.parametrize("scheme", ["tcp", "ipc", "memory"])
def test_a_message_of_the_wrong_number_of_frames_is_refused_and_the_next_is_read(scheme: str, tmp_path: Path) -> None:
    uri = URIS[scheme](tmp_path)
    listener = listen(uri)
    raw = raw_socket(zmq.DEALER, uri)
    raw.connect(memory.endpoint(uri).name if scheme == "memory" else listener.uri)
    for frames in ([b"one"], [b"one", b"two", b"three"], [b"one"] * 50):
        raw.send_multipart(frames)
        with pytest.raises(RemoteWireError) as caught:
            listener.receive(SOON)
        assert caught.value.reason == "malformed"
    raw.send_multipart([b"head", b"body"])
    assert listener.receive(SOON) is not None
    raw.close()
    listener.close()


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_the_connection_of_a_message_of_very_many_frames_is_ended(scheme: str, tmp_path: Path) -> None:
    listener = listen(URIS[scheme](tmp_path))
    raw = raw_socket(zmq.DEALER, listener.uri)
    raw.connect(listener.uri)
    raw.send_multipart([b"head", b"body"])
    peer, _ = received(listener)
    raw.send_multipart([b"x"] * 50_000)
    with pytest.raises(RemoteWireError, match="50000 frames, expected 2"):
        listener.receive(SOON)
    wait_for(lambda: not listener.send(peer, [b"head", b"body"]), why="the connection is still open")
    raw.send_multipart([b"head", b"body"])
    assert received(listener)[0] != peer, "it has connected again"
    raw.close(0)
    listener.close()


@pytest.mark.parametrize("scheme", ["tcp", "ipc", "memory"])
def test_a_listeners_message_of_the_wrong_number_of_frames_is_refused(scheme: str, tmp_path: Path) -> None:
    uri = URIS[scheme](tmp_path)
    raw = raw_socket(zmq.ROUTER, uri)
    raw.bind(memory.endpoint(uri).name if scheme == "memory" else uri)
    connection = connect(uri if scheme == "memory" else raw.getsockopt_string(zmq.LAST_ENDPOINT))
    assert connection.send([b"head", b"body"], SOON)
    peer, *_ = raw.recv_multipart()
    raw.send_multipart([peer, b"one"])
    with pytest.raises(RemoteWireError):
        connection.receive(SOON)
    raw.send_multipart([peer, b"head", b"body"])
    assert connection.receive(SOON) is not None
    connection.close()
    raw.close()


def test_sending_any_number_of_frames_other_than_two_is_refused(
    listener: Listener, dial: Callable[[], Connection]
) -> None:
    connection = dial()
    for frames in ([], [b"one"], [b"one", b"two", b"three"]):
        with pytest.raises(LocalWireError):
            connection.send(frames)
        with pytest.raises(LocalWireError):
            listener.send(b"peer", frames)


def test_a_waiting_receiver_is_woken_from_another_thread(dial: Callable[[], Connection]) -> None:
    connection = dial()
    timer, start = threading.Timer(0.1, connection.wake), time.monotonic()
    timer.start()
    assert connection.receive(4 * SOON) is None
    assert 0.05 < time.monotonic() - start < SOON
    timer.join()


def test_a_wake_before_receive_makes_it_return_immediately(listener: Listener, dial: Callable[[], Connection]) -> None:
    connection = dial()
    for _ in range(100_000):  # more than any wake buffer holds
        connection.wake()
    start = time.monotonic()
    assert connection.receive(4 * SOON) is None
    assert time.monotonic() - start < SOON
    connection.send([b"head", b"body"])
    peer, _ = received(listener)
    assert listener.send(peer, [b"head", b"body"])
    wait_for(lambda: connection.receive(SOON) is not None)


def test_waking_a_closed_connection_does_nothing(dial: Callable[[], Connection]) -> None:
    connection = dial()
    connection.close()
    connection.wake()


def test_sending_to_an_unknown_peer_returns_false(listener: Listener) -> None:
    assert listener.send(b"nobody", [b"head", b"body"]) is False


def test_sending_to_a_peer_that_left_returns_false(listener: Listener, dial: Callable[[], Connection]) -> None:
    connection = dial()
    connection.send([b"head", b"body"])
    got = listener.receive(SOON)
    assert got is not None
    connection.close()
    wait_for(lambda: not listener.send(got[0], [b"head", b"body"]))


def test_closing_twice_is_allowed(uri: str) -> None:
    listener = listen(uri)
    connection = connect(listener.uri)
    for each in (connection, connection, listener, listener):
        each.close()


@pytest.mark.parametrize("scheme", ["ipc", "memory", "queue"])  # the port of tcp is not known yet
def test_a_connection_may_start_before_its_listener(scheme: str, tmp_path: Path) -> None:
    uri = URIS[scheme](tmp_path)
    connection = connect(uri)
    connection.send([b"head", b"body"])
    listener = listen(uri)
    assert listener.receive(SOON) is not None
    connection.close()
    listener.close()


def test_a_full_queue_refuses_messages_and_does_not_grow(uri: str) -> None:
    listener = listen(uri, queue=2)
    connection = connect(listener.uri, queue=2)
    body = bytes(1 << 20)
    sent = 0
    while connection.send([b"head", body], 0.05):
        sent += 1
        assert sent < 100
    assert all(listener.receive(SOON) is not None for _ in range(sent))
    assert listener.receive(0.05) is None
    connection.close()
    listener.close()


@pytest.mark.parametrize("scheme", BETWEEN_PROCESSES)
def test_an_oversized_frame_never_arrives_and_smaller_ones_do(scheme: str, tmp_path: Path) -> None:
    listener = listen(URIS[scheme](tmp_path), max_frame=10_000)
    bad, good = connect(listener.uri), connect(listener.uri)
    bad.send([b"head", bytes(10_001)])
    assert listener.receive(0.2) is None
    good.send([b"head", bytes(10_000)])
    assert listener.receive(SOON) is not None
    for each in (bad, good, listener):
        each.close()


def test_sending_a_frame_above_the_limit_raises_a_local_error(
    listener: Listener, dial: Callable[[], Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "MAX_FRAME", 10)
    with pytest.raises(LocalWireError):
        dial().send([b"head", bytes(11)])


@pytest.mark.parametrize("scheme", BETWEEN_PROCESSES)
def test_a_connection_reconnects_automatically_and_reports_it(scheme: str, tmp_path: Path) -> None:
    listener = listen(URIS[scheme](tmp_path))
    uri = listener.uri
    connection = connect(uri)
    connection.send([b"head", b"1"])
    first = listener.receive(SOON)
    assert first is not None
    assert connection.established() == 1
    listener.close()
    listener = listen(uri)
    wait_for(lambda: connection.receive(0.02) is not None or connection.established() > 1)
    connection.send([b"head", b"2"])
    second = listener.receive(SOON)
    assert second is not None
    assert bytes(second[1][1]) == b"2"
    assert listener.send(first[0], [b"head", b"body"]) is False
    connection.close()
    listener.close()


def test_garbage_on_the_port_does_no_harm() -> None:
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


@pytest.mark.parametrize("scheme", BETWEEN_PROCESSES)
def test_another_process_can_connect(scheme: str, tmp_path: Path) -> None:
    listener = listen(URIS[scheme](tmp_path))
    process = multiprocessing.get_context("forkserver").Process(target=_child, args=(listener.uri,))
    process.start()
    got = listener.receive(SOON)
    assert got is not None
    listener.send(got[0], [b"head", b"to the child"])
    process.join(SOON)
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
def test_invalid_uris_are_input_errors(bad: str) -> None:
    for make in (listen, connect):
        with pytest.raises(InputError):
            make(bad)


@pytest.mark.parametrize("bad", ["tcp://*:5000", "tcp://127.0.0.1:*", "tcp://127.0.0.1:0"])
def test_connecting_to_a_wildcard_address_is_refused(bad: str) -> None:
    with pytest.raises(InputError):
        connect(bad)


def test_an_address_in_use_or_of_another_machine_is_an_input_error(tmp_path: Path) -> None:
    listener = listen("tcp://127.0.0.1:*")
    for bad in (listener.uri, "tcp://192.0.2.1:5000", f"ipc://{tmp_path}/no/such/folder"):
        with pytest.raises(InputError, match=bad.partition("://")[2].split(":")[0]):
            listen(bad)
    listener.close()


def test_a_path_in_use_is_an_input_error_and_a_leftover_one_is_not(tmp_path: Path) -> None:
    uri = f"ipc://{tmp_path}/socket"
    listener = listen(uri)
    with pytest.raises(InputError, match="another process listens"):
        listen(uri)
    connection = connect(uri)
    connection.send([b"head", b"body"])
    assert listener.receive(SOON) is not None
    connection.close()
    listener.close()
    with socket.socket(socket.AF_UNIX) as left:  # a killed listener leaves its file behind
        (tmp_path / "socket").unlink(missing_ok=True)
        left.bind(f"{tmp_path}/socket")
    listen(uri).close()


def test_an_ipv6_address_is_accepted() -> None:
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


def test_importing_the_modules_creates_no_zeromq_context() -> None:
    for module in pkgutil.iter_modules(transports.__path__, f"{transports.__name__}."):
        made = vars(importlib.import_module(module.name)).values()
        assert not any(isinstance(value, zmq.Context | zmq.Socket) for value in made)


def test_no_other_module_imports_zeromq() -> None:
    root = Path(__file__).parent.parent
    outside = {
        str(path.relative_to(root))
        for package in ("fedmq", "protocols", "silos", "coordinator", "benchmarks")
        for path in (root / package).rglob("*.py")
        if "import zmq" in (text := path.read_text(encoding="utf-8")) or "from zmq" in text
    }
    assert outside == {f"fedmq/wire/transports/{name}.py" for name in ("_connection_admission", "_zeromq", "memory")}


@pytest.mark.parametrize(
    ("scheme", "said"), [("tcp", "registered"), ("queue", "registered"), ("Two words", "not a URI scheme")]
)
def test_a_scheme_is_registered_once_and_must_be_a_valid_scheme(scheme: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        register(scheme, memory.TRANSPORT)


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """A function that makes an installed package offer a scheme for the duration of the test."""

    def offer(scheme: str, value: str) -> None:
        point = EntryPoint(scheme, value, registry.GROUP)
        monkeypatch.setattr(registry, "entry_points", lambda group: (point,) if group == registry.GROUP else ())

    monkeypatch.setattr(registry, "TRANSPORTS", dict(registry.TRANSPORTS))
    return offer


def test_an_installed_package_offers_a_scheme(offered: Callable[[str, str], None]) -> None:
    offered("ours", f"{queue_transport.__name__}:TRANSPORT")
    with pytest.raises(InputError, match=r"memory://NAME.* or ours://\.\.\."):
        check_uri("theirs://x", "--bind")
    assert "ours" not in schemes()
    listener = listen("ours://x")
    assert "ours" in schemes()
    assert isinstance(listener, queue_transport.QueueListener)
    listener.close()


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("no.such.module:TRANSPORT", "no.such.module:TRANSPORT: ModuleNotFoundError"),
        ("fedmq.clock:WallClock", "fedmq.clock:WallClock: a type"),
    ],
)
def test_a_scheme_offered_by_a_package_must_be_a_transport(
    value: str, found: str, offered: Callable[[str, str], None]
) -> None:
    offered("ours", value)
    with pytest.raises(InputError, match=f"--bind: entry point ours of fedmq.transports: found ['\"]{found}"):
        check_uri("ours://x", "--bind", listening=True)


def test_a_transport_that_lacks_a_method_cannot_be_instantiated() -> None:
    class Half(Connection):
        uri = "half://x"

        def receive(self, timeout_s: float | None = None) -> list[memoryview] | None:
            return None

    with pytest.raises(TypeError, match="wake"):
        Half()  # type: ignore[abstract]


def test_a_name_that_this_machine_does_not_know_cannot_be_bound() -> None:
    with pytest.raises(InputError, match=r"nowhere\.invalid:5555: found 'the name nowhere\.invalid, which is unknown"):
        listen("tcp://nowhere.invalid:5555")
    if "lo" in [name for _, name in socket.if_nameindex()]:
        listen("tcp://lo:*").close()
