"""Frames of strangers, and damaged, replayed or captured frames of a real silo, in whole runs over memory://."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedmq.wire.payloads import Delta
from fedmq.wire.transports import builtin, registry
from fedmq.wire.transports.base import Connection, Listener, Transport
from tests.threaded_run import resolved, run


def tapped(captured: list[bytes]) -> Transport:
    """``tapped://NAME``: memory://NAME, of which every frame sent is also appended to a list."""

    def end(opened: Any) -> Any:
        send = opened.send

        def tap(*arguments: Any, **options: Any) -> bool:
            captured.extend(bytes(frame) for frame in next(each for each in arguments if not isinstance(each, bytes)))
            return bool(send(*arguments, **options))

        opened.send = tap
        return opened

    def listen(uri: str, max_frame: int, queue: int) -> Listener:
        listener: Listener = end(builtin.MEMORY.listen(uri.replace("tapped", "memory"), max_frame, queue))
        listener.uri = uri
        return listener

    def dial(uri: str, max_frame: int, queue: int) -> Connection:
        connection: Connection = end(builtin.MEMORY.connect(uri.replace("tapped", "memory"), max_frame, queue))
        return connection

    return Transport("tapped://NAME", lambda *_: None, listen, dial)


def test_captured_frames_contain_no_tensor_data_and_no_field_names(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[bytes] = []
    monkeypatch.setattr(registry, "TRANSPORTS", {**registry.TRANSPORTS, "tapped": tapped(captured)})
    run(resolved(tiny, "rounds=2"), tmp_path, scheme="tapped")
    wire = b"".join(captured)
    assert len(wire) > 100_000
    released = load_file(tmp_path / "model" / "model.safetensors")
    for name, tensor in released.items():
        if not bool(torch.any(tensor)):
            continue
        raw = tensor.numpy().tobytes()
        assert raw[:16] not in wire, name
    assert b"layout_digest" not in wire  # nor the names of fields and payload kinds
    assert Delta.KIND.encode() not in wire
