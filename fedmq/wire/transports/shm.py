"""``shm://PATH``: as ``ipc://PATH``, with large bodies in memory that both processes map.

Each end keeps a few *blocks*, memfds that it reuses. The sender seals a body into a block, and sends the block's name
through the socket. The receiver maps the block and opens the body there. Once the receiver's last view of the body is
gone, it acknowledges the body: it writes the message's number into the sender's *marks*, an array with one number for
each message that is not read yet. Once all receivers of a block have done so, the sender may reuse it. If no block is
free, the sender does not wait: the body goes through the socket.

A block cannot shrink, and only its maker can write to it. So reading a block cannot end a process by SIGBUS, and a
third process cannot change a message that is being sealed or opened. The kernel frees blocks when their processes end.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from fedmq.errors import RemoteWireError
from fedmq.wire.codec import BytesLike, fresh_memory
from fedmq.wire.messages import Reason
from fedmq.wire.transports import _zeromq, ipc
from fedmq.wire.transports.base import Connection, Listener, Transport

#: Size from which a body is put into a block [bytes]; smaller ones travel as fast through the socket.
LEAST_BYTES = 1 << 20
#: Blocks of an end, and their size together [bytes].
MOST_BLOCKS, MOST_BYTES = 64, 1 << 30
#: Messages with a block that are not read yet.
MOST_MARKS = 4096
#: Mapped blocks and marks of other processes; each mapping holds a file descriptor.
_MOST_MAPPED = 256
#: Blocks are made in multiples of this size [bytes], since the bodies of a run differ a little.
_STEP = 1 << 20
#: How long an end waits at closing for its messages to be read [s], as ZeroMQ does for messages in its queue.
_LINGER_S = 2.0
#: Linux's ``F_SEAL_FUTURE_WRITE``, which Python does not define.
_FUTURE_WRITE = 0x10
_KEPT = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
#: First byte of frame 0: frame 1 is the body, or the name of a block.
_BODY, _NAMED = b"\0", b"\1"
#: A block's name: process, descriptor and inode of the block, the same two of the marks, number of the mark, of the
#: message, size of the body [bytes].
_NAME = struct.Struct(">8Q")
_Marks = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class _Memfd:
    """Memory made by this process; open until it is closed."""

    memory: mmap.mmap
    descriptor: int
    inode: int

    @classmethod
    def create(cls, size: int, seals: int) -> _Memfd:
        """Make sealed memory; raises OSError if there is not enough of it, or too many files are open."""
        descriptor = os.memfd_create("fedmq", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, size)
            memory = mmap.mmap(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            return cls(memory, descriptor, os.fstat(descriptor).st_ino)
        except OSError:
            os.close(descriptor)
            raise


@dataclass(frozen=True)
class _Unread:
    """A message whose block the receiver may still read."""

    mark: int  # index of its mark
    number: int  # of the message
    peer: bytes | int


@dataclass
class _Block:
    """Memory for one body at a time, which may go to several peers."""

    memfd: _Memfd
    # Returns the array in which a message is being sealed or sent, or None.
    given: Callable[[], object] = lambda: None
    unread: list[_Unread] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.memfd.memory)


class Blocks:
    """The blocks in which one end sends.

    Args:
        connected: whether a peer's connection is still open; other peers no longer read what was sent to them.
    """

    def __init__(self, connected: Callable[[Any], bool]) -> None:
        self._connected = connected
        self._blocks: list[_Block] = []
        self._marked: _Memfd | None = None
        self._marks: _Marks = np.zeros(MOST_MARKS, np.uint64)
        self._free_marks = list(range(MOST_MARKS))
        self._sent = 0

    def room(self, size: int) -> memoryview:
        """Memory for a body of a size [bytes]: a free block if the body is large, otherwise private memory."""
        block = None
        if size >= LEAST_BYTES:
            block = self._free(size) or self._add(size)
        if block is None:
            return fresh_memory(size)
        array = np.frombuffer(block.memfd.memory, np.uint8, size)
        block.given = weakref.ref(array)
        return array.data

    def _free(self, size: int) -> _Block | None:
        self._note_read()
        return next(
            (each for each in self._blocks if each.size >= size and not each.unread and each.given() is None), None
        )

    def _note_read(self) -> None:
        """Forget the messages that their receivers have read, or can no longer read."""
        for block in self._blocks:
            for message in [each for each in block.unread if self._is_read(each)]:
                block.unread.remove(message)
                self._free_marks.append(message.mark)

    def _is_read(self, message: _Unread) -> bool:
        return bool(self._marks[message.mark] >= message.number) or not self._connected(message.peer)

    def _add(self, size: int) -> _Block | None:
        """A new block; None if there are too many, or the machine has no memory for it."""
        size += -size % _STEP
        if len(self._blocks) == MOST_BLOCKS or sum(block.size for block in self._blocks) + size > MOST_BYTES:
            return None
        try:
            if self._marked is None:
                self._marked = _Memfd.create(self._marks.nbytes, _KEPT)
                self._marks = np.frombuffer(self._marked.memory, np.uint64)
            self._blocks.append(_Block(_Memfd.create(size, _KEPT | _FUTURE_WRITE)))
        except OSError:
            return None
        return self._blocks[-1]

    def send(self, frames: Sequence[BytesLike], peer: bytes | int, put: Callable[[Sequence[BytesLike]], bool]) -> bool:
        """Send a message with ``put``; of a last frame in a block from :meth:`room`, only the block's name is sent."""
        header, *between, body = frames
        view = memoryview(body)
        whole = isinstance(view.obj, np.ndarray) and view.obj.nbytes == view.nbytes
        block = next((block for block in self._blocks if whole and block.given() is view.obj), None)
        if block is not None and not self._free_marks:
            self._note_read()
        if block is None or self._marked is None or not self._free_marks:
            return put([_BODY + bytes(header), *between, body])
        number, mark, own, marks = self._sent + 1, self._free_marks[-1], block.memfd, self._marked
        name = _NAME.pack(
            os.getpid(), own.descriptor, own.inode, marks.descriptor, marks.inode, mark, number, view.nbytes
        )
        if not put([_NAMED + bytes(header), *between, name]):
            return False
        self._sent = number
        block.unread.append(_Unread(self._free_marks.pop(), number, peer))
        return True

    def close(self) -> None:
        """Wait at most two seconds until all messages are read, then close the blocks; no peer can open them again."""
        until = time.monotonic() + _LINGER_S
        while any(not self._is_read(each) for block in self._blocks for each in block.unread):
            if time.monotonic() >= until:
                break
            time.sleep(0.005)
        for memfd in [block.memfd for block in self._blocks] + ([self._marked] if self._marked else []):
            os.close(memfd.descriptor)
        self._blocks, self._marked = [], None


@dataclass(frozen=True)
class _Mapped:
    """Memory of another process, by name."""

    process: int
    descriptor: int  # of that process
    inode: int
    marks: bool  # true for marks, which are mapped for writing; false for a block, which is mapped for reading

    @property
    def path(self) -> str:
        return f"/proc/{self.process}/fd/{self.descriptor}"

    def exists(self) -> bool:
        """Whether its process still holds it."""
        try:
            return Path(self.path).stat().st_ino == self.inode
        except OSError:
            return False

    def map(self) -> mmap.mmap:
        """Map it.

        Raises:
            RemoteWireError: it cannot be opened, or is not safe to use.
        """
        access, protection = (
            (os.O_RDWR, mmap.PROT_READ | mmap.PROT_WRITE) if self.marks else (os.O_RDONLY, mmap.PROT_READ)
        )
        try:
            descriptor = os.open(self.path, access | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            try:
                if problem := self._problem(descriptor):
                    raise RemoteWireError(Reason.MALFORMED, f"block {self.path} is {problem}")
                return mmap.mmap(descriptor, 0, mmap.MAP_SHARED, protection)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            need = "shm:// needs both processes on one machine, of one user and in one container"
            raise RemoteWireError(Reason.MALFORMED, f"block {self.path}: {error}; {need}") from error

    def _problem(self, descriptor: int) -> str:
        """What is wrong with the opened file; empty if nothing is."""
        found, seals = os.fstat(descriptor), _KEPT if self.marks else _KEPT | _FUTURE_WRITE
        if not stat.S_ISREG(found.st_mode) or found.st_ino != self.inode:
            return "another file"
        if found.st_uid != os.geteuid():
            return f"of user {found.st_uid}, not {os.geteuid()}"
        try:
            held = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError:  # not a memfd
            held = 0
        if held & seals != seals:
            return "not sealed"
        # If the machine has no memory left, reading a page that was never allocated ends the process.
        return "not whole" if 512 * found.st_blocks < found.st_size else ""


class MappedBlocks:
    """The blocks of other processes, mapped while they exist; peers are not trusted.

    Args:
        max_body: maximum size of an accepted body [bytes].
    """

    def __init__(self, max_body: int) -> None:
        self._max_body = max_body
        self._mapped: dict[_Mapped, mmap.mmap] = {}  # the one used last is the last

    def frames(self, frames: list[memoryview]) -> list[memoryview]:
        """The frames of a received message; a body in a block stays valid as long as a view of it exists.

        Raises:
            RemoteWireError: ``malformed`` or ``oversized``: no name of a block, or not one of this user, sealed and as
                large as the body.
        """
        first, *between, body = frames
        mark = bytes(first[:1])
        if mark not in (_BODY, _NAMED):
            raise RemoteWireError(Reason.MALFORMED, "a frame that does not say where its body is")
        return [first[1:], *between, body if mark == _BODY else self._body(body)]

    def _body(self, name: memoryview) -> memoryview:
        if name.nbytes != _NAME.size:
            raise RemoteWireError(Reason.MALFORMED, f"the name of a block has {name.nbytes} bytes, not {_NAME.size}")
        process, descriptor, inode, marks_descriptor, marks_inode, place, number, size = _NAME.unpack(name)
        if size > self._max_body:
            raise RemoteWireError(Reason.OVERSIZED, f"a body of {size} bytes in a block, allowed {self._max_body}")
        marks = self._map(_Mapped(process, marks_descriptor, marks_inode, marks=True))
        block = self._map(_Mapped(process, descriptor, inode, marks=False))
        if size > len(block) or 8 * (place + 1) > len(marks):
            detail = f"a body of {size} bytes in a block of {len(block)} bytes, with mark {place}"
            raise RemoteWireError(Reason.MALFORMED, detail)
        array = np.frombuffer(block, np.uint8, size)
        mark = np.frombuffer(marks, np.uint64, 1, 8 * place)
        weakref.finalize(array, _mark_read, mark, np.uint64(number)).atexit = False
        return array.data

    def _map(self, name: _Mapped) -> mmap.mmap:
        found = self._mapped.pop(name, None)
        if found is None:
            # Drops the mappings of ended processes, whose memory the kernel could not free otherwise.
            self._mapped = {each: memory for each, memory in self._mapped.items() if each.exists()}
            found = name.map()
        self._mapped[name] = found
        if len(self._mapped) > _MOST_MAPPED:
            del self._mapped[next(iter(self._mapped))]
        return found


def _mark_read(mark: npt.NDArray[np.uint64], number: np.uint64) -> None:
    mark[0] = max(mark[0], number)


class ShmListener(Listener):
    """A listener whose peers are processes of the same user on the same machine."""

    shares = True

    def __init__(self, inner: _zeromq.ZeroMQListener, uri: str, max_frame: int) -> None:
        self._inner, self.uri = inner, uri
        self._blocks, self._mapped = Blocks(inner.connected), MappedBlocks(max_frame)

    @override
    def receive(self, timeout_s: float | None = None) -> tuple[bytes, list[memoryview]] | None:
        received = self._inner.receive(timeout_s)
        return None if received is None else (received[0], self._mapped.frames(received[1]))

    @override
    def room(self, size: int) -> memoryview:
        return self._blocks.room(size)

    @override
    def send(self, peer: bytes, frames: Sequence[BytesLike]) -> bool:
        return self._blocks.send(frames, peer, lambda named: self._inner.send(peer, named))

    @override
    def cut(self, peer: bytes) -> None:
        self._inner.cut(peer)

    @override
    def close(self) -> None:
        self._blocks.close()
        self._inner.close()


class ShmConnection(Connection):
    """A connection to a listener of the same user on the same machine."""

    def __init__(self, inner: Connection, uri: str, max_frame: int) -> None:
        self._inner, self.uri = inner, uri
        self._blocks, self._mapped = Blocks(lambda number: number == self._number()), MappedBlocks(max_frame)

    def _number(self) -> int:
        """Number of the connection by which a message that is sent now travels."""
        return max(1, self._inner.established())

    @override
    def receive(self, timeout_s: float | None = None) -> list[memoryview] | None:
        frames = self._inner.receive(timeout_s)
        return None if frames is None else self._mapped.frames(frames)

    @override
    def room(self, size: int) -> memoryview:
        return self._blocks.room(size)

    @override
    def send(self, frames: Sequence[BytesLike], timeout_s: float | None = 0.0) -> bool:
        return self._blocks.send(frames, self._number(), lambda named: self._inner.send(named, timeout_s))

    @override
    def wake(self) -> None:
        self._inner.wake()

    @override
    def established(self) -> int:
        return self._inner.established()

    @override
    def reconnect(self) -> None:
        self._inner.reconnect()

    @override
    def close(self) -> None:
        self._blocks.close()
        self._inner.close()


def _listen(uri: str, max_frame: int, queue: int) -> Listener:
    ipc.require_free(uri)
    return ShmListener(_zeromq.bind("ipc" + uri.removeprefix("shm"), max_frame, queue), uri, max_frame)


def _connect(uri: str, max_frame: int, queue: int) -> Connection:
    return ShmConnection(_zeromq.dial("ipc" + uri.removeprefix("shm"), max_frame, queue), uri, max_frame)


TRANSPORT = Transport("shm://PATH", ipc.check, _listen, _connect)
