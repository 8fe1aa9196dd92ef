"""Many peers of one process over one connection, so that a thousand silos need a few file descriptors.

Each peer keeps its own key, session and message log. Only the transport differs: two bytes before the unencrypted
header tell the branches of a connection apart. A URI ``shared+tcp://HOST:PORT`` or ``shared+ipc://PATH`` selects it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from typing_extensions import override

from fedmq.errors import RemoteWireError
from fedmq.wire.codec import BytesLike
from fedmq.wire.messages import Reason
from fedmq.wire.transports.base import Connection, Listener

#: Prefix of the URI schemes.
SHARED = "shared+"
#: Bytes of a branch's number, big endian.
_NUMBER_BYTES = 2
#: Maximum number of branches of a connection.
MAX_BRANCHES = 1 << 8 * _NUMBER_BYTES
#: Silos of a connection that keep the usual heartbeat. More beat less often: a thousand silos would send 500 a second.
_USUAL_BEATS = 16


def beat_patience(branches: int) -> float:
    """Factor of the interval between heartbeats on a connection with this many branches, at both of its ends."""
    return max(1.0, branches / _USUAL_BEATS)


class SharedListener(Listener):
    """A listener whose peers are the branches of its connections.

    Args:
        inner: the listener of the connections.
    """

    def __init__(self, inner: Listener) -> None:
        self._inner = inner
        self.uri, self.shares = SHARED + inner.uri, inner.shares

    @override
    def receive(self, timeout_s: float | None = None) -> tuple[bytes, list[memoryview]] | None:
        received = self._inner.receive(timeout_s)
        if received is None:
            return None
        address, (first, body) = received
        if first.nbytes < _NUMBER_BYTES:
            raise RemoteWireError(Reason.MALFORMED, "a frame without the number of its branch")
        return address + bytes(first[:_NUMBER_BYTES]), [first[_NUMBER_BYTES:], body]

    @override
    def room(self, size: int) -> memoryview:
        return self._inner.room(size)

    @override
    def send(self, peer: bytes, frames: Sequence[BytesLike]) -> bool:
        return self._inner.send(peer[:-_NUMBER_BYTES], _marked(peer[-_NUMBER_BYTES:], frames))

    @override
    def close(self) -> None:
        self._inner.close()


class SharedConnection:
    """A connection with branches; made and used by one thread, except for the branches' ``wake``."""

    def __init__(self, inner: Connection) -> None:
        self._inner = inner
        self._branches: dict[bytes, Branch] = {}
        self._unanswered: set[bytes] = set()

    def branch(self, number: int) -> Branch:
        """Open a branch that is not in use yet, of number 0 to :data:`MAX_BRANCHES` - 1."""
        mark = number.to_bytes(_NUMBER_BYTES, "big")
        branch = self._branches[mark] = Branch(self, mark, self._inner)
        return branch

    def pump(self, timeout_s: float | None) -> None:
        """Receive the messages that have arrived, for all branches; wait for the first one, see ``receive``."""
        while (frames := self._inner.receive(timeout_s)) is not None:
            timeout_s = 0.0
            self._unanswered.clear()
            first, *rest = frames
            branch = self._branches.get(bytes(first[:_NUMBER_BYTES]))
            if branch is not None:  # otherwise a branch that is closed
                branch.arrived.append([first[_NUMBER_BYTES:], *rest])

    def reconnect(self, mark: bytes) -> None:
        """A branch gets no answer; if that is true of most and nothing else arrived, make a new connection."""
        self._unanswered.add(mark)
        if 2 * len(self._unanswered) > len(self._branches):
            self._unanswered.clear()
            self._inner.reconnect()

    def close(self) -> None:
        """Close all branches and the connection."""
        self._branches.clear()
        self._inner.close()


class Branch(Connection):
    """One peer's part of a shared connection."""

    def __init__(self, shared: SharedConnection, mark: bytes, inner: Connection) -> None:
        self.uri = SHARED + inner.uri
        self._shared, self._mark, self._inner = shared, mark, inner
        self.arrived: deque[list[memoryview]] = deque()  # received and not yet read messages

    @override
    def receive(self, timeout_s: float | None = None) -> list[memoryview] | None:
        """The next message of this branch; None also if a message of another branch arrives first."""
        if not self.arrived:
            self._shared.pump(timeout_s)
        return self.arrived.popleft() if self.arrived else None

    @override
    def wake(self) -> None:
        self._inner.wake()

    @override
    def room(self, size: int) -> memoryview:
        return self._inner.room(size)

    @override
    def send(self, frames: Sequence[BytesLike], timeout_s: float | None = 0.0) -> bool:
        return self._inner.send(_marked(self._mark, frames), timeout_s)

    @override
    def established(self) -> int:
        return self._inner.established()

    def reconnect(self) -> None:
        """Ask for a new connection; other branches need this one, which is kept until most of them get no answer."""
        self._shared.reconnect(self._mark)

    def close(self) -> None:
        """Close the shared connection."""
        self._shared.close()


def _marked(mark: bytes, frames: Sequence[BytesLike]) -> list[BytesLike]:
    """The frames with a branch's number before the first one, which is a short header."""
    header, *rest = frames
    return [mark + bytes(header), *rest]
