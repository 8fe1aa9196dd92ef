"""Time from a silo sending an update to its sum at the coordinator, compared with the unavoidable operations."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from benchmarks.line import MEGABYTES, PARAMETERS, coordinator_end, gather, link_of, started, two_branches
from benchmarks.measure import Number, Result, spread, torch_threads
from coordinator.updates import check_reply
from fedmq.config.scenario import Training
from fedmq.federation.protocol import Context, SiloFacts
from fedmq.federation.updates import read_only
from fedmq.wire.fields import all_finite
from fedmq.wire.messages import Kind, Message, TaskInfo
from fedmq.wire.payloads import Delta
from protocols.parts.aggregation import accumulate

_WARM, _REPEATS = 8, 60
_SILO = "silo-00"


def _silo(uri: str, folder: Path) -> None:
    """Send an update for each task, until a stop."""
    torch.set_num_threads(1)
    layout = two_branches()
    update = np.random.default_rng(0).standard_normal(PARAMETERS).astype(np.float32)
    link = link_of(uri, folder / "keys", folder, _SILO)
    link.start()
    try:
        while (message := link.receive()) is not None and message.header.kind is not Kind.STOP:
            number, delta = message.header.sequence, Delta(layout.digest, update, n_samples=100)
            link.send(Kind.REPLY, (delta,), sequence=number, reply_to=number, base_version=0)
    finally:
        link.close()


def _over(uri: str, folder: Path) -> list[float]:
    """Milliseconds from the silo's call of send until the update is summed."""
    layout = two_branches()
    context = Context(0, 1, (), layout, 512, Training())
    total = torch.zeros(PARAMETERS, dtype=torch.float64)
    times = []
    with coordinator_end(uri, folder, [_SILO]) as (listener, roster, _), started(_silo, [(listener.uri, folder)]):
        gather(listener, roster, 1)
        for number in range(1, _WARM + _REPEATS + 1):
            time.sleep(0.005)  # let logs and buffers of the last update finish
            info = TaskInfo(round=number - 1, rounds=_WARM + _REPEATS, committed=0, learning_rate=0.1)
            header = roster.header(_SILO, Kind.TASK, sequence=number, base_version=0)
            roster.send(_SILO, Message(header, task=info))
            message = None
            while not isinstance(message, Message):
                got = listener.receive(1.0)
                message = None if got is None else roster.take(*got)
            check_reply(message, frozenset({Delta}), context, SiloFacts(_SILO, 0, True, True))
            delta = message.payloads[0]
            assert isinstance(delta, Delta)
            accumulate(total, [(read_only(delta.buffer), 0.1)])
            times.append((time.monotonic() - message.header.sent_at) * 1e3)
            del got, message, delta
        roster.send(_SILO, roster.header(_SILO, Kind.STOP))
    return times[_WARM:]


def floor() -> list[float]:
    """Milliseconds of encryption, one copy, decryption, check and sum in one process, with preallocated buffers."""
    update = np.random.default_rng(0).standard_normal(PARAMETERS).astype(np.float32)
    plain = update.view(np.uint8)
    sealed, copied = np.empty(plain.size + 16, np.uint8), np.empty(plain.size + 16, np.uint8)
    opened = np.empty(plain.size, np.uint8)
    cipher = AESGCM(bytes(32))
    total = torch.zeros(PARAMETERS, dtype=torch.float64)
    times = []
    for number in range(_WARM + _REPEATS):
        nonce = number.to_bytes(12, "big")
        began = time.perf_counter()
        cipher.encrypt_into(nonce, plain.data, b"header", sealed.data)
        np.copyto(copied, sealed)
        cipher.decrypt_into(nonce, copied.data, b"header", opened.data)
        values = opened.view(np.float32)
        assert all_finite(values)
        accumulate(total, [(torch.from_numpy(values), 0.1)])
        times.append((time.perf_counter() - began) * 1e3)
    return times[_WARM:]


def run(*, smoke: bool = False) -> Result:
    """Measure over ipc, with shared memory, over tcp on the loopback device, and the lower bound.

    ``smoke`` changes nothing: fewer updates would not reach the limits on a silo's messages.
    """
    del smoke
    # One thread, as the coordinator.
    with torch_threads(1), tempfile.TemporaryDirectory(prefix="bench-") as folder:
        root = Path(folder)
        for name in ("ipc", "shm", "tcp"):
            (root / name).mkdir()
        ipc = _over(f"ipc://{root / 'wire'}", root / "ipc")
        shm = _over(f"shm://{root / 'wire'}", root / "shm")
        tcp = _over("tcp://127.0.0.1:*", root / "tcp")
        alone = floor()
    least = spread("floor: seal, copy, open, check, add in one process", alone, "ms")
    numbers = []
    for name, values, aim in (("ipc", ipc, 1.5), ("shm", shm, 1.5), ("tcp", tcp, 2)):
        whole = spread(f"silo to sum over {name}", values, "ms")
        numbers += [
            whole,
            Number(f"  as a multiple of the floor, {name}", whole.value / least.value, "x", f"at most {aim}"),
        ]
    note = f"an update of {MEGABYTES:.2f} MB, {_REPEATS} times, both message logs written"
    return Result("delta", (*numbers, least), (note,))
