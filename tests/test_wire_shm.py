"""Large bodies over shm:// are in blocks that are used again; a block that is not as it must be is refused."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import mmap
import multiprocessing
import os
import struct
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmq.audit.log_checks import audit_run
from fedmq.errors import RemoteWireError
from fedmq.wire.log_records import MessageRecord, read_log
from fedmq.wire.messages import Kind
from fedmq.wire.sessions import Session, open_message, seal_message
from fedmq.wire.transports import _shared_memory, _zeromq
from fedmq.wire.transports.base import Connection, Listener
from fedmq.wire.transports.registry import connect, listen
from tests import threaded_run
from tests.command_line import printed
from tests.threaded_run import resolved
from tests.waiting import wait_for
from tests.wire_examples import RUN, message

SOON = 100.0
SIZE = 3 << 20


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Listener, Connection]]:
    listener = listen(f"shm://{tmp_path}/socket")
    connection = connect(listener.uri)
    introduce(listener, connection)
    yield listener, connection
    monkeypatch.setattr(_shared_memory, "_LINGER_S", 0.0)  # what a test has left unread is read no more
    for end in (connection, listener):
        end.close()


def introduce(listener: Listener, connection: Connection) -> bytes:
    """Let both ends learn of each other that they can open each other's blocks; returns the connection's address."""
    assert connection.send([b"head", b"hello"])
    got = listener.receive(SOON)
    assert got is not None and listener.send(got[0], [b"head", b"welcome"])
    wait_for(lambda: connection.receive(SOON))
    assert connection.send([b"head", b"ready"])
    assert listener.receive(SOON) is not None
    return got[0]


def filled(end: Listener | Connection, value: int, size: int = SIZE) -> memoryview:
    """A body of equal bytes in the memory that an end gives."""
    body = end.room(size)
    np.frombuffer(body, np.uint8)[:] = value
    return body


def place(body: memoryview) -> int:
    return int(np.frombuffer(body, np.uint8).ctypes.data)


def received(listener: Listener) -> tuple[bytes, memoryview]:
    got = listener.receive(SOON)
    assert got is not None
    return got[0], got[1][1]


def is_full_of(body: memoryview, value: int, size: int = SIZE) -> bool:
    return body.nbytes == size and bool((np.frombuffer(body, np.uint8) == value).all())


def memfds() -> int:
    """Number of blocks and marks of this process."""
    gc.collect()  # those of earlier tests
    return sum("memfd:" in str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())


def in_socket(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the second frames that a connection hands to its socket from now on."""
    assert isinstance(connection, _zeromq.ZeroMQConnection)
    sizes, put = list[int](), _zeromq.put

    def counted(socket: Any, frames: Any) -> bool:
        if socket is connection._socket:
            sizes.append(memoryview(frames[1]).nbytes)
        return put(socket, frames)

    monkeypatch.setattr(_zeromq, "put", counted)
    return sizes


# ------------------------------------------------------------------------------------------------------------ blocks
def test_a_large_body_is_in_a_block_that_is_used_again_once_no_view_of_it_is_left(
    ends: tuple[Listener, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, connection = ends
    sizes = in_socket(connection, monkeypatch)
    body = filled(connection, 1)
    first = place(body)
    assert place(filled(connection, 2)) != first, "its message is not sent yet"
    body[:] = bytes([1]) * SIZE
    assert connection.send([b"head", body])
    del body
    peer, arrived = received(listener)
    assert is_full_of(arrived, 1) and arrived.readonly
    part = arrived[10:20]
    del arrived
    second = filled(connection, 3)
    assert place(second) != first, "a view of the first one is left"
    assert bytes(part) == bytes([1]) * 10
    del second, part
    assert place(filled(connection, 4)) == first
    assert connection.send([b"head", b"small"]) and bytes(received(listener)[1]) == b"small"
    small = filled(connection, 5, _shared_memory.LEAST_BYTES - 1)
    assert connection.send([b"head", small])
    assert is_full_of(received(listener)[1], 5, small.nbytes)
    assert sizes == [56, 5, _shared_memory.LEAST_BYTES - 1]
    assert listener.send(peer, [b"head", filled(listener, 6)])
    answer = connection.receive(SOON)
    assert answer is not None and bytes(answer[0]) == b"head" and is_full_of(answer[1], 6)


def test_without_a_free_block_bodies_go_through_the_socket_in_order(
    ends: tuple[Listener, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_shared_memory, "MOST_BLOCKS", 2)
    listener, connection = ends
    sizes = in_socket(connection, monkeypatch)
    for number in range(5):
        assert connection.send([b"head", filled(connection, number)], SOON)
    kept = [received(listener)[1] for _ in range(5)]
    assert all(is_full_of(body, number) for number, body in enumerate(kept))
    assert sizes == [56, 56, SIZE, SIZE, SIZE]
    kept.clear()
    assert connection.send([b"head", filled(connection, 9)]) and sizes[-1] == 56
    assert is_full_of(received(listener)[1], 9)


@pytest.mark.parametrize("why", ["another user", "other numbers of processes", "a relay"])
def test_to_peers_that_cannot_open_blocks_bodies_go_through_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    user, own = os.geteuid(), os.getpid()
    match why:
        case "another user":
            monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        case "other numbers of processes":
            monkeypatch.setattr(_shared_memory, "_may_read", lambda _: False)
        case "a relay":
            monkeypatch.setattr(os, "getpid", lambda: own + 1)
    uri = f"shm://{tmp_path}/socket"
    with contextlib.closing(listen(uri)) as listener, contextlib.closing(connect(uri)) as connection:
        sizes = in_socket(connection, monkeypatch)
        peer = introduce(listener, connection)
        assert connection.send([b"head", filled(connection, 1)], SOON)
        assert is_full_of(received(listener)[1], 1)
        assert sizes[-1] == SIZE
        assert listener.send(peer, [b"head", filled(listener, 2)])
        got = connection.receive(SOON)
        assert got is not None and is_full_of(got[1], 2)


def test_without_memory_bodies_go_through_the_socket(
    ends: tuple[Listener, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_memory)
    listener, connection = ends
    before = memfds()
    assert connection.send([b"head", filled(connection, 1)], SOON)
    assert is_full_of(received(listener)[1], 1)
    assert memfds() == before, "one is left open"


def test_what_a_peer_that_is_gone_did_not_read_is_used_for_others(
    ends: tuple[Listener, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_shared_memory, "MOST_BLOCKS", 1)
    listener, connection = ends
    gone = introduce(listener, connection)
    body = filled(listener, 1)
    first = place(body)
    assert listener.send(gone, [b"head", body])
    del body
    assert place(filled(listener, 2)) != first
    connection.close()
    wait_for(lambda: place(filled(listener, 3)) == first, why="the block is still kept for the peer that is gone")


def test_one_block_goes_to_several_peers_and_is_used_again_once_all_have_read_it(
    ends: tuple[Listener, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_shared_memory, "MOST_BLOCKS", 1)
    listener, connection = ends
    others = [connection, connect(listener.uri), connect(listener.uri)]
    peers = [introduce(listener, each) for each in others]
    body = filled(listener, 7)
    first = place(body)
    for peer in peers:
        assert listener.send(peer, [b"head", b"own", body])
    del body
    for each in others[:2]:
        got = each.receive(SOON)
        assert got is not None and bytes(got[1]) == b"own" and is_full_of(got[2], 7)
        assert place(filled(listener, 0)) != first, "a reader is left"
        del got
    others[2].close()
    others[1].close()
    wait_for(lambda: place(filled(listener, 0)) == first, why="the block is kept for a peer that is gone")


def test_a_connection_that_was_made_again_uses_what_the_former_listener_did_not_read(tmp_path: Path) -> None:
    listener = listen(f"shm://{tmp_path}/socket")
    connection = connect(listener.uri)
    introduce(listener, connection)
    body = filled(connection, 1)
    first = place(body)
    assert connection.send([b"head", body])
    del body
    listener.close()
    listener = listen(listener.uri)
    wait_for(lambda: connection.receive(0.02) is not None or connection.established() > 1)
    assert place(filled(connection, 2)) == first
    for end in (connection, listener):
        end.close()


def test_closing_waits_for_a_message_to_be_read(
    ends: tuple[Listener, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, connection = ends
    assert connection.send([b"head", filled(connection, 7)])
    read = list[bool]()
    monkeypatch.setattr(time, "sleep", lambda _: read.append(is_full_of(received(listener)[1], 7)))
    connection.close()
    assert read == [True]


# ------------------------------------------------------------------------------------------------- processes that end
def _sender(uri: str, line: Pipe) -> None:
    connection = connect(uri)
    assert connection.send([b"head", b"hello"]) and connection.receive(SOON) is not None
    for number in range(2):
        connection.send([b"head", filled(connection, number)], SOON)
        line.send("sent")
        line.recv()


def test_of_a_killed_process_nothing_is_left_and_what_was_not_read_is_refused(
    ends: tuple[Listener, Connection],
) -> None:
    listener, connection = ends
    assert isinstance(listener, _zeromq.ZeroMQListener)
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_sender, args=(listener.uri, theirs))
    process.start()
    listener.send(received(listener)[0], [b"head", b"welcome"])
    ours.recv()
    _, body = received(listener)
    assert listener._memory is not None
    mapped = listener._memory._mapped
    assert len(mapped._mapped) == 2, "a block and the marks"
    ours.send("go on")
    ours.recv()
    wait_for(lambda: listener._socket.poll(0), why="the second message has not arrived")
    process.kill()
    process.join()
    assert is_full_of(body, 0), "what is mapped can still be read"
    del body
    with pytest.raises(RemoteWireError, match="No such file"):
        listener.receive(SOON)
    assert connection.send([b"head", filled(connection, 5)])
    assert is_full_of(received(listener)[1], 5)
    assert {name.process for name in mapped._mapped} == {os.getpid()}


@pytest.mark.slow
def test_killed_silos_and_coordinators_leave_the_model_as_over_ipc(tiny: Path, tmp_path: Path) -> None:
    settings = ("rounds=6", "participation=1.0", "backbone.bottleneck=16384")
    faults = "faults=[{kind: crash, silos: [silo-00], rounds: [1]}, {kind: coordinator_crash, after_round: 3}]"
    outcome = threaded_run.run(resolved(tiny, *settings), tmp_path / "ipc", uri=f"ipc://{tmp_path}/wire")
    assert outcome.summary is not None
    ipc = outcome.summary.plain()
    assert not audit_run(tmp_path / "ipc").findings
    for name, more in (("shm", ()), ("killed", (faults,))):
        out, options = tmp_path / name, (*settings, *more)
        printed("scenario", tiny, "--out", out, "--quiet", *(f"--set={each}" for each in options))
        assert not audit_run(out).findings
        summary = json.loads((out / "summary.json").read_text())
        assert summary["model_digest"] == ipc["model_digest"]
        assert more or summary["bytes"] == ipc["bytes"]
    log = read_log(tmp_path / "shm" / "messages" / "coordinator.jsonl")
    tasks = [each.bytes for _, each in log if isinstance(each, MessageRecord) and each.header.kind is Kind.TASK]
    assert tasks and min(tasks) > _shared_memory.LEAST_BYTES


# ------------------------------------------------------------------------------------------------------ hostile peers
NAME, PREFIX = struct.Struct(">7Q"), struct.Struct(">BI")
OWN = PREFIX.pack(1, os.getpid())


@pytest.fixture
def blocks() -> Iterator[_shared_memory.Blocks]:
    made = _shared_memory.Blocks(lambda _: False)
    yield made
    made.close()


def named(blocks: _shared_memory.Blocks) -> list[int]:
    """The numbers of a block's name, as an honest peer sends it."""
    body = blocks.room(SIZE)
    np.frombuffer(body, np.uint8)[:] = 1
    found = blocks.named(body, 1)
    assert found is not None
    found[1]()
    return list(NAME.unpack(found[0]))


def memory(size: int, seals: int, *, whole: bool = True) -> tuple[int, int]:
    """Descriptor and inode of memory that a peer made."""
    descriptor = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.truncate(descriptor, size)
    if whole and size:
        os.posix_fallocate(descriptor, 0, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor, os.fstat(descriptor).st_ino


KEPT = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def with_block(block: Callable[[], tuple[int, int]]) -> Callable[[list[int]], list[int]]:
    return lambda name: [*block(), *name[2:]]


def of_file(path: str) -> tuple[int, int]:
    descriptor = os.open(path, os.O_RDONLY)
    return descriptor, os.fstat(descriptor).st_ino


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(lambda name: [1 << 40, *name[1:]], "No such file", id="no descriptor"),
        pytest.param(lambda name: [name[0], name[1] + 1, *name[2:]], "is another file", id="reused descriptor"),
        pytest.param(with_block(lambda: of_file("/dev/zero")), "is another file", id="device"),
        pytest.param(with_block(lambda: of_file(__file__)), "is not sealed", id="file"),
        pytest.param(with_block(lambda: memory(SIZE, 0)), "is not sealed", id="unsealed"),
        pytest.param(with_block(lambda: memory(SIZE, KEPT)), "is not sealed", id="writable by others"),
        pytest.param(with_block(lambda: memory(SIZE, KEPT | 16, whole=False)), "is not whole", id="without pages"),
        pytest.param(with_block(lambda: memory(0, KEPT | 16)), "empty file", id="empty"),
        pytest.param(with_block(lambda: memory(SIZE // 2, KEPT | 16)), f"a body of {SIZE} bytes", id="too small"),
        pytest.param(lambda name: [*name[:2], *name[:2], *name[4:]], "not permitted", id="a block as marks"),
        pytest.param(lambda name: [*name[2:4], *name[2:]], "is not sealed", id="marks as a block"),
        pytest.param(lambda name: [*name[:4], 1 << 50, *name[5:]], "with mark", id="no such mark"),
        pytest.param(lambda name: [*name[:6], 1 << 30], f"a body of {1 << 30} bytes", id="above the block"),
        pytest.param(lambda name: [*name[:6], 1 << 40], "allowed", id="above the limit"),
    ],
)
def test_a_name_of_a_bad_block_is_refused_and_the_next_message_is_read(
    ends: tuple[Listener, Connection],
    blocks: _shared_memory.Blocks,
    change: Callable[[list[int]], list[int]],
    said: str,
) -> None:
    listener, connection = ends
    assert isinstance(connection, _zeromq.ZeroMQConnection)
    forged = NAME.pack(*change(named(blocks)))
    assert _zeromq.put(connection._socket, [OWN + b"head", forged])
    with pytest.raises(RemoteWireError, match=said) as caught:
        listener.receive(SOON)
    assert caught.value.reason == ("oversized" if said == "allowed" else "malformed")
    assert _zeromq.put(connection._socket, [OWN + b"head", NAME.pack(*named(blocks))])
    assert is_full_of(received(listener)[1], 1)


def test_other_frames_are_refused_and_another_users_block(
    ends: tuple[Listener, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, connection = ends
    assert isinstance(connection, _zeromq.ZeroMQConnection)
    for frames, said in (
        ([OWN + b"head", b"x" * 55], "55 bytes"),
        ([PREFIX.pack(4, 1), b""], "unknown flags 4"),
        ([b"head", b""], "where"),
        ([PREFIX.pack(1, 1), NAME.pack(*7 * [1])], "of process 1, which cannot be opened here"),
    ):
        assert _zeromq.put(connection._socket, frames)
        with pytest.raises(RemoteWireError, match=said):
            listener.receive(SOON)
    introduce(listener, connection)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert connection.send([b"head", filled(connection, 1)])
    with pytest.raises(RemoteWireError, match=f"of user {user}, not {user + 1}"):
        listener.receive(SOON)


def test_nobody_but_its_maker_can_change_or_shorten_a_block(ends: tuple[Listener, Connection]) -> None:
    _, connection = ends
    body = filled(connection, 1)
    assert isinstance(connection, _zeromq.ZeroMQConnection) and connection._memory
    (block,) = connection._memory._blocks._blocks
    path = f"/proc/{os.getpid()}/fd/{block.memfd.descriptor}"
    descriptor = os.open(path, os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, 0)
    for change in (lambda: os.write(descriptor, b"x"), lambda: os.truncate(descriptor, 1)):
        with pytest.raises(PermissionError):
            change()
    os.close(descriptor)
    assert is_full_of(body, 1)


def test_a_block_that_its_sender_changes_after_sealing_is_tampered_with(ends: tuple[Listener, Connection]) -> None:
    listener, connection = ends
    up, down = os.urandom(32), os.urandom(32)
    silo = Session(run=RUN, name="silo-00", peer="coordinator", session=bytes(16), send_key=up, receive_key=down)
    other = Session(run=RUN, name="coordinator", peer="silo-00", session=bytes(16), send_key=down, receive_key=up)
    assert isinstance(connection, _zeromq.ZeroMQConnection) and connection._memory
    for number in range(2):
        sealed = silo.seal(message(number).header, [bytes(SIZE)], connection.room)
        assert connection.send(sealed.frames)
        got = listener.receive(SOON)
        assert got is not None
        assert sum(frame.nbytes for frame in got[1]) == sealed.size, "counted as over ipc"
        if number:
            connection._memory._blocks._blocks[0].memfd.memory[1000] ^= 1
            with pytest.raises(RemoteWireError) as caught:
                other.open(got[1])
            assert caught.value.reason == "tampered"
        else:
            assert other.open(got[1]).body == bytes(SIZE)
        del sealed, got
    sealed = seal_message(silo, message(3), connection.room)
    assert connection.send(sealed.frames)
    got = listener.receive(SOON)
    assert got is not None
    with pytest.raises(RemoteWireError, match="expected 1"):
        open_message(other, got[1])
