"""Whatever the spelling of an address, a silo reaches the coordinator that is bound to it."""

from __future__ import annotations

import ipaddress
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fedmq.errors import InputError
from fedmq.wire.transports import tcp
from fedmq.wire.transports.base import Listener
from fedmq.wire.transports.registry import check_uri, connect, listen
from tests.waiting import PATIENCE

SOON = 5.0
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
        got = listener.receive(SOON)
        assert got is not None, (listener.uri, uri)
        assert bytes(got[1][1]) == uri.encode()
        assert listener.send(got[0], [b"head", b"answer"])
        answer = connection.receive(SOON)
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


@given(
    host=st.one_of(
        hosts_4,
        st.integers(0, (1 << 128) - 1).map(ipaddress.IPv6Address).flatmap(spellings).map("[{}]".format),
        st.from_regex(r"[a-z][a-z0-9-]{0,20}(\.[a-z]{2,5})?", fullmatch=True),
    ),
    port=st.integers(0, 70_000),
)
@settings(max_examples=80, deadline=None)
def test_an_address_of_a_host_is_accepted_exactly_with_a_valid_port(host: str, port: int) -> None:
    for listening, least in ((True, 0), (False, 1)):
        if least <= port <= 65535:
            check_uri(f"tcp://{host}:{port}", "uri", listening=listening)
        else:
            with pytest.raises(InputError):
                check_uri(f"tcp://{host}:{port}", "uri", listening=listening)


@given(families=st.sets(st.sampled_from([socket.AF_INET, socket.AF_INET6]), min_size=1), name=st.just("silo.example"))
@settings(max_examples=4, deadline=None)
def test_ipv6_is_used_for_a_name_exactly_if_it_has_no_ipv4_address(
    families: set[socket.AddressFamily], name: str
) -> None:
    def known(host: str, *_: object, **__: object) -> list[tuple[socket.AddressFamily]]:
        assert host == name
        return [(family,) for family in families]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", known)
        assert tcp._needs_ipv6(f"tcp://{name}:5555") == (socket.AF_INET not in families)


#: Run where ``dual`` is the name of 127.0.0.1 and ::1: is a listener at one of them reached, also if it starts later?
DUAL = """
import sys, time
from fedmq.wire.transports.registry import connect, listen

host, later = sys.argv[1], sys.argv[2] == "later"
listener = listen(f"tcp://{host}:*")
port = listener.uri.rpartition(":")[2]
if later:
    listener.close()
connection = connect(f"tcp://dual:{port}")
connection.send([b"head", b"x"])
until, got = time.monotonic() + 100, None
if later:
    while connection._attempts < 4:
        connection.refusal()
    listener = listen(f"tcp://{host}:{port}")
while got is None and time.monotonic() < until:
    assert connection.refusal() is None
    got = listener.receive(0.01)
assert got is not None and bytes(got[1][1]) == b"x", host
assert listener.send(got[0], [b"head", b"answer"])
assert connection.receive(100.0) is not None
assert connection.established() == 1 and connection.refusal() is None and not connection._unsent
assert listener.receive(0.1) is None
"""


@needs_ipv6
@pytest.mark.slow
@pytest.mark.parametrize("when", ["now", "later"])
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "*"])
def test_a_name_with_addresses_of_both_families_reaches_a_listener_at_either(
    host: str, when: str, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 dual\n::1 dual\n")
    own_hosts = f'mount --bind "{tmp_path}/hosts" /etc/hosts'
    if subprocess.run(["unshare", "-m", "sh", "-c", own_hosts], capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a file of its own over /etc/hosts")
    program = f'{own_hosts} && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", program, "sh", sys.executable, "-c", DUAL, host, when]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
