"""Large bodies of ``shm://`` in memory that both processes map.

Each end keeps a few *blocks*, memfds that it reuses. The sender seals a body into a block, and sends the block's name
through the socket. The receiver maps the block and opens the body there. Once the receiver's last view of the body is
gone, it acknowledges the body: it writes the message's number into the sender's *marks*, an array with one number for
each message that is not read yet. Once all receivers of a block have done so, the sender may reuse it. If no block is
free, the sender does not wait: the body goes through the socket.

Each message states its sender's process. If it is the one that the kernel names as the other end of the socket, and
its blocks can be opened here, this end says so in its own messages, and is sent names from then on. So peers of other
users, in other containers or behind a relay exchange the same messages without blocks.

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

from fedmq.errors import RemoteWireError
from fedmq.wire.codec import BytesLike, fresh_memory
from fedmq.wire.limits import BoundedDict
from fedmq.wire.messages import Reason

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
#: Before the first frame: flags, and the sender's process.
PREFIX = struct.Struct(">BI")
#: Flags: the last frame is the name of a block; the sender can open the receiver's blocks.
NAMED, READS = 1, 2
#: A block's name: descriptor and inode of the block, the same two of the marks, number of the mark, of the message,
#: size of the body [bytes].
_NAME = struct.Struct(">7Q")
#: Peers of which an end knows whether they can open blocks.
_MOST_PEERS = 1 << 14
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

    def named(self, body: BytesLike, peer: bytes | int) -> tuple[bytes, Callable[[], None]] | None:
        """The name of the block from :meth:`room` that holds a body, and what to call once it is sent to a peer.

        None if the body is in no block, or too many messages are unread.
        """
        view = memoryview(body)
        whole = isinstance(view.obj, np.ndarray) and view.obj.nbytes == view.nbytes
        block = next((block for block in self._blocks if whole and block.given() is view.obj), None)
        if block is not None and not self._free_marks:
            self._note_read()
        if block is None or self._marked is None or not self._free_marks:
            return None
        number, mark, own, marks = self._sent + 1, self._free_marks[-1], block.memfd, self._marked

        def sent() -> None:
            self._sent = number
            block.unread.append(_Unread(self._free_marks.pop(), number, peer))

        places = own.descriptor, own.inode, marks.descriptor, marks.inode
        return _NAME.pack(*places, mark, number, view.nbytes), sent

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
            raise RemoteWireError(Reason.MALFORMED, f"block {self.path}: {error}") from error

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

    def body(self, process: int, name: memoryview) -> memoryview:
        """The body in a block of a process; it stays valid as long as a view of it exists.

        Raises:
            RemoteWireError: ``malformed`` or ``oversized``: no name of a block, or not one of this user, sealed and as
                large as the body.
        """
        if name.nbytes != _NAME.size:
            raise RemoteWireError(Reason.MALFORMED, f"the name of a block has {name.nbytes} bytes, not {_NAME.size}")
        descriptor, inode, marks_descriptor, marks_inode, place, number, size = _NAME.unpack(name)
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


@dataclass(frozen=True)
class _Peer:
    """What an end knows of a peer from its last message."""

    process: int = 0  # as the peer states it
    readable: bool = False  # whether the peer's blocks can be opened here
    reads: bool = False  # whether the peer says that it can open the blocks of this end


class SharedMemory:
    """The blocks of both directions at one end.

    Args:
        connected: whether a peer's connection is still open.
        max_body: maximum size of an accepted body [bytes].
    """

    def __init__(self, connected: Callable[[Any], bool], max_body: int) -> None:
        self._blocks, self._mapped = Blocks(connected), MappedBlocks(max_body)
        self._peers = BoundedDict[bytes | int, _Peer](_MOST_PEERS)
        self.room, self.close = self._blocks.room, self._blocks.close

    def send(self, frames: Sequence[BytesLike], peer: bytes | int, put: Callable[[Sequence[BytesLike]], bool]) -> bool:
        """Send a message with ``put``; of a body in a block, only the name, if the peer can open it."""
        header, *rest = frames
        known = self._peers.get(peer, _Peer())
        found = self._blocks.named(rest[-1], peer) if known.reads else None
        flags = READS if known.readable else 0
        if found is None:
            return put([PREFIX.pack(flags, os.getpid()) + bytes(header), *rest])
        name, sent = found
        if not put([PREFIX.pack(flags | NAMED, os.getpid()) + bytes(header), *rest[:-1], name]):
            return False
        sent()
        return True

    def received(self, frames: Sequence[memoryview], peer: bytes | int, process: int) -> list[memoryview]:
        """The frames of a message from a peer, with its body; ``process`` is at its end by the kernel's word, or 0.

        Raises:
            RemoteWireError: ``malformed`` or ``oversized``: a wrong prefix, or a block that must not be used.
        """
        first, *between, body = frames
        if first.nbytes < PREFIX.size:
            raise RemoteWireError(Reason.MALFORMED, "a frame that does not say where its body is")
        flags, stated = PREFIX.unpack(first[: PREFIX.size])
        if flags & ~(NAMED | READS):
            raise RemoteWireError(Reason.MALFORMED, f"a frame with the unknown flags {flags}")
        known = self._peers.get(peer)
        readable = known.readable if known and known.process == stated else stated == process and _may_read(stated)
        self._peers[peer] = _Peer(stated, readable, bool(flags & READS))
        if flags & NAMED and not readable:
            raise RemoteWireError(Reason.MALFORMED, f"a block of process {stated}, which cannot be opened here")
        return [first[PREFIX.size :], *between, self._mapped.body(stated, body) if flags & NAMED else body]


def _may_read(process: int) -> bool:
    """Whether a process has this one's user and its numbers of processes, and lets this one open its files."""
    try:
        return Path(f"/proc/{process}/ns/pid").readlink() == Path("/proc/self/ns/pid").readlink()
    except OSError:
        return False
