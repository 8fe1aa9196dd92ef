"""A conformance test for every registered transport, and errors and addresses specific to each scheme."""

from __future__ import annotations

import importlib
import ipaddress
import multiprocessing
import pkgutil
import socket
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import zmq
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fedmq.errors import InputError, RemoteWireError
from fedmq.wire import transports
from fedmq.wire.transports import builtin, registry
from fedmq.wire.transports.base import Connection, Listener
from fedmq.wire.transports.registry import check_uri, connect, connect_shared, listen, register
from fedmq.wire.transports.shared_connections import beat_patience
from tests import queue_transport
from tests.waiting import memory_uri, wait_for

SOON = 100.0
#: For each scheme a function from the test's folder to a URI to listen on.
URIS: dict[str, Callable[[Path], str]] = {
    "tcp": lambda _: "tcp://127.0.0.1:*",
    "ipc": lambda folder: f"ipc://{folder}/socket",
    "shm": lambda folder: f"shm://{folder}/socket",
    "memory": lambda _folder: memory_uri(),
    "queue": lambda folder: f"queue://{folder}",
    "shared+tcp": lambda _: "shared+tcp://127.0.0.1:*",
    "shared+ipc": lambda folder: f"shared+ipc://{folder}/socket",
    "shared+shm": lambda folder: f"shared+shm://{folder}/socket",
}
MESSAGE = [b"head", b"body"]


@pytest.fixture(params=[*URIS])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return URIS[request.param](tmp_path)


@pytest.fixture(params=["tcp", "ipc", "shm"])
def between_processes(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A URI over ZeroMQ between processes, where a peer may be any program."""
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


def received(end: Listener) -> tuple[bytes, list[bytes]]:
    got = end.receive(SOON)
    assert got is not None
    return got[0], [bytes(frame) for frame in got[1]]


def answer_to(connection: Connection) -> list[bytes]:
    """The next message; None is returned also if a message of another branch arrives first."""
    return [bytes(frame) for frame in wait_for(lambda: connection.receive(SOON))]


# ------------------------------------------------------------------------------------------------- every transport
def test_messages_are_delivered_whole_in_order_and_to_their_peers(
    uri: str, listener: Listener, dial: Callable[[], Connection]
) -> None:
    assert "*" not in listener.uri and listener.uri.partition("://")[0] == uri.partition("://")[0]
    connections = [dial() for _ in range(3)]
    for number, connection in enumerate(connections):
        for part in range(20):
            assert connection.send([b"head", bytes([number, part])])
    last = dict[bytes, list[int]]()
    for _ in range(60):
        peer, (head, body) = received(listener)
        assert head == b"head" and body[1] == len(last.setdefault(peer, []))
        last[peer].append(body[1])
        assert listener.send(peer, [b"back", body])
    for number, connection in enumerate(connections):
        assert [answer_to(connection) for _ in range(20)] == [[b"back", bytes([number, part])] for part in range(20)]
    large = np.random.default_rng(0).integers(0, 256, 5_000_000, dtype=np.uint8)
    assert connections[0].send([b"head", large.data], SOON)
    peer, (_, body) = received(listener)
    assert np.array_equal(np.frombuffer(body, np.uint8), large)
    if listener.shares:
        part = listener.room(large.size)
        part[:] = large.data
        for other in last:
            assert listener.send(other, [b"head", other, part])
        for connection in connections:
            head, own, arrived = answer_to(connection)
            assert (head, own in last, arrived == large.tobytes()) == (b"head", True, True)


def test_receiving_times_out_and_is_woken_from_another_thread(
    listener: Listener, dial: Callable[[], Connection]
) -> None:
    connection = dial()
    for end in (listener, connection):
        assert end.receive(0) is None
        assert end.receive(0.05) is None
    timer = threading.Timer(0.1, connection.wake)
    timer.start()
    assert connection.receive(None) is None
    timer.join()
    for _ in range(100_000):  # more than any wake buffer holds
        connection.wake()
    assert connection.receive(None) is None, "a wake before it counts, too"
    connection.send(MESSAGE)
    assert listener.send(received(listener)[0], MESSAGE)
    assert answer_to(connection) == MESSAGE
    connection.close()
    connection.wake()


def test_what_cannot_arrive_is_dropped(listener: Listener, dial: Callable[[], Connection]) -> None:
    connection = dial()
    assert listener.send(b"unknown", MESSAGE) is False
    connection.send(MESSAGE)
    peer, _ = received(listener)
    connection.close()
    wait_for(lambda: not listener.send(peer, MESSAGE))
    connection.close()  # closing twice is allowed


def test_a_full_queue_refuses_messages_and_does_not_grow(uri: str) -> None:
    listener = listen(uri, queue=2)
    connection = connect(listener.uri, queue=2)
    sent = 0
    while connection.send([b"head", bytes(1 << 20)], 0.05):
        sent += 1
        assert sent < 100
    assert all(listener.receive(SOON) is not None for _ in range(sent))
    assert listener.receive(0.05) is None
    for end in (connection, listener, listener):
        end.close()


@pytest.mark.parametrize("scheme", ["ipc", "shm", "memory", "queue"])  # the port of tcp is not known yet
def test_a_connection_may_start_before_its_listener(scheme: str, tmp_path: Path) -> None:
    uri = URIS[scheme](tmp_path)
    connection = connect(uri)
    connection.send(MESSAGE)
    listener = listen(uri)
    assert listener.receive(SOON) is not None
    connection.close()
    listener.close()


# ---------------------------------------------------------------------------------------------------------- ZeroMQ
def raw_socket(kind: int, uri: str) -> zmq.Socket[bytes]:
    """A raw ZeroMQ socket without this project's rules; unbound and unconnected."""
    context = builtin.memory_endpoint(uri).context if uri.startswith("memory:") else zmq.Context.instance()
    return context.socket(kind)


@pytest.mark.parametrize("scheme", ["tcp", "ipc", "memory"])
def test_a_message_of_the_wrong_number_of_frames_is_refused_at_both_ends_and_the_next_is_read(
    scheme: str, tmp_path: Path
) -> None:
    uri = URIS[scheme](tmp_path)
    listener, raw = listen(uri), raw_socket(zmq.DEALER, uri)
    raw.connect(builtin.memory_endpoint(uri).name if scheme == "memory" else listener.uri)
    for frames in ([b"one"], [b"one", b"two", b"three"], [b"one"] * 50):
        raw.send_multipart(frames)
        with pytest.raises(RemoteWireError) as caught:
            listener.receive(SOON)
        assert caught.value.reason == "malformed"
    raw.send_multipart(MESSAGE)
    assert listener.receive(SOON) is not None
    raw.close()
    listener.close()
    uri = f"ipc://{tmp_path}/other" if scheme == "ipc" else URIS[scheme](tmp_path)
    raw = raw_socket(zmq.ROUTER, uri)
    raw.bind(builtin.memory_endpoint(uri).name if scheme == "memory" else uri)
    connection = connect(uri if scheme == "memory" else raw.getsockopt_string(zmq.LAST_ENDPOINT))
    assert connection.send(MESSAGE, SOON)
    peer, *_ = raw.recv_multipart()
    raw.send_multipart([peer, b"one"])
    with pytest.raises(RemoteWireError):
        connection.receive(SOON)
    raw.send_multipart([peer, *MESSAGE])
    assert answer_to(connection) == MESSAGE
    connection.close()
    raw.close()


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_the_connection_of_a_message_of_very_many_frames_is_ended(scheme: str, tmp_path: Path) -> None:
    listener = listen(URIS[scheme](tmp_path))
    raw = raw_socket(zmq.DEALER, listener.uri)
    raw.connect(listener.uri)
    raw.send_multipart(MESSAGE)
    peer, _ = received(listener)
    raw.send_multipart([b"x"] * 50_000)
    with pytest.raises(RemoteWireError, match="50000 frames, expected 2"):
        listener.receive(SOON)
    wait_for(lambda: not listener.send(peer, MESSAGE), why="the connection is still open")
    raw.send_multipart(MESSAGE)
    assert received(listener)[0] != peer, "it has connected again"
    raw.close(0)
    listener.close()


def test_an_oversized_frame_and_garbage_never_arrive_and_smaller_frames_do(between_processes: str) -> None:
    listener = listen(between_processes, max_frame=10_000)
    bad, good = connect(listener.uri), connect(listener.uri)
    bad.send([b"head", bytes(10_001)])
    if listener.uri.startswith("tcp"):
        host, port = listener.uri.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    assert listener.receive(0.2) is None
    good.send([b"head", bytes(10_000)])
    assert listener.receive(SOON) is not None
    for end in (bad, good, listener):
        end.close()


def test_a_connection_reconnects_automatically_and_reports_it(between_processes: str) -> None:
    listener = listen(between_processes)
    connection = connect(listener.uri)
    connection.send([b"head", b"1"])
    first, _ = received(listener)
    assert connection.established() == 1
    listener.close()
    listener = listen(listener.uri)
    wait_for(lambda: connection.receive(0.02) is not None or connection.established() > 1)
    connection.send([b"head", b"2"])
    assert received(listener)[1] == [b"head", b"2"]
    assert listener.send(first, MESSAGE) is False
    connection.close()
    listener.close()


def _child(uri: str) -> None:
    connection = connect(uri)
    got = connection.receive(SOON) if connection.send([b"head", b"from the child"]) else None
    connection.close()
    raise SystemExit(0 if got is not None and bytes(got[1]) == b"to the child" else 1)


def test_another_process_can_connect(between_processes: str) -> None:
    listener = listen(between_processes)
    process = multiprocessing.get_context("forkserver").Process(target=_child, args=(listener.uri,))
    process.start()
    listener.send(received(listener)[0], [b"head", b"to the child"])
    process.join(SOON)
    assert process.exitcode == 0
    listener.close()


# ------------------------------------------------------------------------------------------------------- addresses
def test_invalid_uris_are_input_errors(tmp_path: Path) -> None:
    for bad in (
        "", "tcp", "tcp://", "tcp://host", "tcp://host:99999", "tcp://host:port", "tcp://ho st:80", "udp://127.0.0.1:5",
        "tcp://a:1;tcp://b:2", "inproc://x", "ipc://", "ipc://" + "a" * 108, "shm://", "memory://", "memory://a b",
    ):  # fmt: skip
        for make in (listen, connect):
            with pytest.raises(InputError):
                make(bad)
    for bad in ("tcp://*:5000", "tcp://127.0.0.1:*", "tcp://127.0.0.1:0"):
        with pytest.raises(InputError):
            connect(bad)
    listener = listen("tcp://127.0.0.1:*")
    for bad in (listener.uri, "tcp://192.0.2.1:5000", "tcp://nowhere.invalid:5555", f"ipc://{tmp_path}/no/folder"):
        with pytest.raises(InputError, match=bad.partition("://")[2].split(":")[0]):
            listen(bad)
    listener.close()
    if "lo" in [name for _, name in socket.if_nameindex()]:
        listen("tcp://lo:*").close()


def test_a_path_in_use_is_an_input_error_and_a_leftover_one_is_not(tmp_path: Path) -> None:
    uri = f"ipc://{tmp_path}/socket"
    listener = listen(uri)
    with pytest.raises(InputError, match="another process listens"):
        listen(uri)
    connection = connect(uri)
    connection.send(MESSAGE)
    assert listener.receive(SOON) is not None
    connection.close()
    listener.close()
    with socket.socket(socket.AF_UNIX) as left:  # a killed listener leaves its file behind
        (tmp_path / "socket").unlink(missing_ok=True)
        left.bind(f"{tmp_path}/socket")
    listen(uri).close()


# --------------------------------------------------------------------------------------------- many peers over one
def test_each_branch_of_a_shared_connection_gets_its_own_messages(tmp_path: Path) -> None:
    listener = listen(f"shared+ipc://{tmp_path}/socket")
    shared, plain = connect_shared(listener.uri), connect(f"ipc://{tmp_path}/socket")
    branches = [shared.branch(number) for number in (0, 1, 700)]
    for number, branch in enumerate(branches):
        assert branch.send([b"head", bytes([number])])
    peers = set()
    for _ in branches:
        peer, (_, body) = received(listener)
        peers.add(peer)
        assert listener.send(peer[:-1] + b"\x09", [b"head", b"for a branch that is closed"])
        assert listener.send(peer, [b"answer", body])
    assert len(peers) == 3
    for number, branch in reversed(list(enumerate(branches))):
        assert answer_to(branch) == [b"answer", bytes([number])]
    plain.send([b"\x01", b"body"])
    with pytest.raises(RemoteWireError, match="number of its branch"):
        listener.receive(SOON)
    for end in (plain, shared, listener):
        end.close()


def test_hosts_of_many_silos_send_no_more_heartbeats_than_hosts_of_a_few() -> None:
    assert beat_patience(1) == beat_patience(16) == 1.0
    for branches in (32, 100, 1000):
        assert branches / beat_patience(branches) == pytest.approx(16)


# ---------------------------------------------------------------------------------------------------- the registry
def test_importing_the_modules_creates_no_zeromq_context_and_no_other_module_imports_zeromq() -> None:
    for module in pkgutil.iter_modules(transports.__path__, f"{transports.__name__}."):
        made = vars(importlib.import_module(module.name)).values()
        assert not any(isinstance(value, zmq.Context | zmq.Socket) for value in made)
    root = Path(__file__).parent.parent
    outside = {
        str(path.relative_to(root))
        for package in ("fedmq", "protocols", "silos", "coordinator", "benchmarks")
        for path in (root / package).rglob("*.py")
        if "import zmq" in (text := path.read_text(encoding="utf-8")) or "from zmq" in text
    }
    assert outside == {f"fedmq/wire/transports/{name}.py" for name in ("_connection_admission", "_zeromq", "builtin")}


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """A function that makes an installed package offer a scheme for the duration of the test."""

    def offer(scheme: str, value: str) -> None:
        point = EntryPoint(scheme, value, registry.GROUP)
        monkeypatch.setattr(registry, "entry_points", lambda group: (point,) if group == registry.GROUP else ())

    monkeypatch.setattr(registry, "TRANSPORTS", dict(registry.TRANSPORTS))
    return offer


def test_an_installed_package_offers_a_scheme_which_is_registered_once(offered: Callable[[str, str], None]) -> None:
    offered("ours", f"{queue_transport.__name__}:TRANSPORT")
    with pytest.raises(InputError, match=r"memory://NAME.* or ours://\.\.\."):
        check_uri("theirs://x", "--bind")
    assert "ours" not in registry.TRANSPORTS
    listener = listen("ours://x")
    assert "ours" in registry.TRANSPORTS
    assert isinstance(listener, queue_transport.QueueListener)
    listener.close()
    for scheme, said in (("tcp", "registered"), ("ours", "registered"), ("Two words", "not a URI scheme")):
        with pytest.raises(ValueError, match=said):
            register(scheme, builtin.MEMORY)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("no.such.module:TRANSPORT", "no.such.module:TRANSPORT: ModuleNotFoundError"),
        ("fedmq.clock:WallClock", "fedmq.clock:WallClock: a type"),
    ],
)
def test_a_scheme_offered_by_a_package_must_be_a_transport(
    value: str, problem: str, offered: Callable[[str, str], None]
) -> None:
    offered("ours", value)
    with pytest.raises(InputError, match=f"--bind: entry point ours of fedmq.transports: found ['\"]{problem}"):
        check_uri("ours://x", "--bind", listening=True)


# ---------------------------------------------------------------------------------------------------------- addresses
AT_ONCE = 5.0
#: Examples are not made simpler: each one that fails waits for a message.
QUICK = (Phase.explicit, Phase.reuse, Phase.generate)
LOOPBACK_6 = ipaddress.IPv6Address("::1")


def _ipv6_works() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _ipv6_works(), reason="this machine has no IPv6 loopback")


@st.composite
def spellings(draw: st.DrawFn, address: ipaddress.IPv6Address) -> str:
    """One of the ways to write an IPv6 address: with or without leading zeros, capitals and the longest ``::``."""
    groups = [int(each, 16) for each in address.exploded.split(":")]
    written = [draw(st.sampled_from([f"{each:x}", f"{each:04x}", f"{each:X}"])) for each in groups]
    runs = [
        (first, last)
        for first in range(8)
        for last in range(first + 1, 9)
        if not any(groups[first:last]) and draw(st.booleans())
    ]
    if runs:
        first, last = draw(st.sampled_from(runs))
        return f"{':'.join(written[:first])}::{':'.join(written[last:])}"
    return ":".join(written)


hosts_4 = st.integers(1, 0xFFFFFE).map(lambda number: str(ipaddress.IPv4Address(0x7F000000 + number)))
#: Addresses of the loopback interface as one may write them, and how to connect to a listener there.
loopback_4 = st.one_of(hosts_4, st.just("localhost")).map(lambda host: (host, host))
loopback_6 = st.tuples(spellings(LOOPBACK_6), spellings(LOOPBACK_6)).map(lambda two: (f"[{two[0]}]", f"[{two[1]}]"))
any_4 = hosts_4.flatmap(lambda host: st.sampled_from(["0.0.0.0", "*"]).map(lambda every: (every, host)))
any_6 = spellings(LOOPBACK_6).flatmap(
    lambda host: st.sampled_from(["[::]", "*"]).map(lambda every: (every, f"[{host}]"))
)


def port_of(listener: Listener) -> int:
    return int(listener.uri.rpartition(":")[2])


def assert_connected(listener: Listener, uri: str) -> None:
    """A message arrives over a new connection, and its answer returns."""
    connection = connect(uri)
    try:
        connection.send([b"head", uri.encode()])
        got = listener.receive(AT_ONCE)
        assert got is not None, (listener.uri, uri)
        assert bytes(got[1][1]) == uri.encode()
        assert listener.send(got[0], [b"head", b"answer"])
        answer = connection.receive(AT_ONCE)
        assert answer is not None and bytes(answer[1]) == b"answer"
    finally:
        connection.close()


def assert_reachable(bound: str, host: str) -> None:
    listener = listen(f"tcp://{bound}:*")
    try:
        assert_connected(listener, f"tcp://{host}:{port_of(listener)}")
        # What the listener reports can be bound and, unless it means all interfaces, connected to.
        check_uri(listener.uri, "bind", listening=True)
        if bound not in ("*", "0.0.0.0", "[::]"):
            assert_connected(listener, listener.uri)
    finally:
        listener.close()


@given(st.one_of(loopback_4, any_4))
@settings(max_examples=12, deadline=None, phases=QUICK)
def test_a_silo_reaches_a_coordinator_at_any_ipv4_address(pair: tuple[str, str]) -> None:
    assert_reachable(*pair)


@needs_ipv6
@given(st.one_of(loopback_6, any_6))
@settings(max_examples=12, deadline=None, phases=QUICK)
def test_a_silo_reaches_a_coordinator_at_any_spelling_of_an_ipv6_address(pair: tuple[str, str]) -> None:
    assert_reachable(*pair)


@pytest.fixture
def everywhere() -> Iterator[Listener]:
    listener = listen("tcp://*:*")
    yield listener
    listener.close()


@needs_ipv6
def test_one_wildcard_listener_serves_ipv4_and_ipv6_at_once(everywhere: Listener) -> None:
    for host in ("127.0.0.1", "[::1]", "localhost", "127.0.0.2"):
        assert_connected(everywhere, f"tcp://{host}:{port_of(everywhere)}")
