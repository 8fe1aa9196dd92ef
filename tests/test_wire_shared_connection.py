"""Many peers over one connection: each gets its own messages, and the process needs one connection for all."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedmq.errors import RemoteWireError
from fedmq.wire.transports.registry import connect, connect_shared, listen
from fedmq.wire.transports.shared_connections import beat_patience

SOON = 5.0


def test_each_branch_gets_the_answers_to_its_own_messages(tmp_path: Path) -> None:
    listener = listen(f"shared+ipc://{tmp_path}/socket")
    shared = connect_shared(listener.uri)
    branches = [shared.branch(number) for number in (0, 1, 700)]
    for number, branch in enumerate(branches):
        assert branch.send([b"head", bytes([number])])
    peers = set()
    for _ in branches:
        got = listener.receive(SOON)
        assert got is not None
        peer, (head, body) = got
        peers.add(peer)
        assert bytes(head) == b"head"
        assert listener.send(peer, [b"answer", bytes(body)])
    assert len(peers) == 3
    for number, branch in reversed(list(enumerate(branches))):
        answer = None
        while answer is None:
            answer = branch.receive(SOON)
        assert [bytes(frame) for frame in answer] == [b"answer", bytes([number])]
    shared.close()
    listener.close()


def test_a_message_for_a_branch_that_is_closed_is_dropped(tmp_path: Path) -> None:
    listener = listen(f"shared+ipc://{tmp_path}/socket")
    shared = connect_shared(listener.uri)
    branch = shared.branch(3)
    branch.send([b"head", b""])
    got = listener.receive(SOON)
    assert got is not None
    listener.send(got[0][:-1] + b"\x09", [b"head", b"for another"])
    listener.send(got[0], [b"head", b"for this"])
    frames = branch.receive(SOON)
    frames = branch.receive(SOON) if frames is None else frames
    assert frames is not None
    assert bytes(frames[1]) == b"for this"
    shared.close()
    listener.close()


def test_a_frame_too_short_for_the_number_of_its_branch_is_refused(tmp_path: Path) -> None:
    listener = listen(f"shared+ipc://{tmp_path}/socket")
    plain = connect(f"ipc://{tmp_path}/socket")
    plain.send([b"\x01", b"body"])
    with pytest.raises(RemoteWireError, match="number of its branch"):
        listener.receive(SOON)
    plain.close()
    listener.close()


def test_hosts_of_many_silos_send_no_more_heartbeats_than_hosts_of_a_few() -> None:
    assert beat_patience(1) == beat_patience(16) == 1.0
    for branches in (32, 100, 1000):
        assert branches / beat_patience(branches) == pytest.approx(16)
