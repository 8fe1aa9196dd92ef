"""``tcp://HOST:PORT``: ZeroMQ over TCP, between hosts."""

from __future__ import annotations

import re

from fedmq.errors import InputError
from fedmq.wire.transports import _zeromq
from fedmq.wire.transports.base import Transport

_FORM = "tcp://HOST:PORT"
_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+|\*):(\d{1,5}|\*)")


def _check(uri: str, place: str, listening: bool) -> None:
    match = _TCP.fullmatch(uri)
    if match is None:
        raise InputError(place, uri, _FORM)
    host, port = match.groups()
    if not listening and (host == "*" or port == "*"):
        raise InputError(place, uri, f"{_FORM} without *, which is for listening only")
    if port != "*" and not (0 if listening else 1) <= int(port) <= 65535:
        raise InputError(place, uri, "a port from 1 to 65535")


TRANSPORT = Transport(_FORM, _check, _zeromq.bind, _zeromq.dial)
