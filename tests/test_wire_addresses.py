"""Whatever the spelling of an address, a silo reaches the coordinator that is bound to it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fedmq.wire.transports.base import Listener
from fedmq.wire.transports.registry import check_uri, connect, listen

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
