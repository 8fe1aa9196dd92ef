"""A coordinator endpoint and silo processes for message benchmarks, with real keys, logs, channels and sessions."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from coordinator.peers import Ready
from coordinator.sessions import Roster
from fedmq.clock import WallClock
from fedmq.wire.channel import Channel
from fedmq.wire.codec import keep_buffers
from fedmq.wire.keys import init_keys, load_accepted, load_identity
from fedmq.wire.layout import Layout
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import COORDINATOR
from fedmq.wire.transports.base import Listener
from fedmq.wire.transports.registry import listen
from fedmq.wire.transports.tickets import ListenerKeys

RUN = "bench"
#: The size of RCSR's adapters and heads on CLIP: 12.12 MB of float32.
PARAMETERS = 3_033_600
MEGABYTES = PARAMETERS * 4 / 1e6
_PATIENCE_S = 60.0
_MAX_BODY = 1 << 26

#: Like the simulator's start method, but a plain forkserver, whose processes can import this package.
CONTEXT = multiprocessing.get_context("forkserver")
# Its processes share these imports: ten of them on two cores would take half a minute for their own.
CONTEXT.set_forkserver_preload(["benchmarks.line"])


def two_branches(parameters: int = PARAMETERS) -> Layout:
    """A layout of this number of float32 values, half of them for each modality."""
    half = parameters // 2
    return Layout.of([("text.weight", (half,), "float32"), ("visual.weight", (parameters - half,), "float32")])


def link_of(uri: str, keys: Path, out: Path, name: str) -> Channel:
    """A silo's channel; timestamps are of the monotonic clock, which all processes of the machine share."""
    keep_buffers(12 * PARAMETERS)  # three models, as a silo's process does
    clock = WallClock()
    log = MessageLog(out / f"{name}.jsonl", name, clock)
    return Channel(uri, load_identity(keys, name), load_accepted(keys), RUN, log, clock, now=time.monotonic)


@contextmanager
def coordinator_end(bind: str, folder: Path, names: Sequence[str]) -> Iterator[tuple[Listener, Roster, MessageLog]]:
    """Keys for all peers, and the coordinator's listener, roster and log."""
    keep_buffers()  # as the coordinator's process does
    keys = folder / "keys"
    init_keys(keys, (COORDINATOR, *names))
    clock, identity, accepted = WallClock(), load_identity(keys, COORDINATOR), load_accepted(keys)
    listener = listen(bind, keys=ListenerKeys(identity.key.public_key(), accepted))
    log = MessageLog(folder / "coordinator.jsonl", COORDINATOR, clock)
    try:
        yield listener, Roster(listener, identity, accepted, RUN, log, clock, max_body=_MAX_BODY), log
    finally:
        listener.close()
        log.close()


@contextmanager
def started(target: Callable[..., None], arguments: Sequence[tuple[object, ...]]) -> Iterator[list[BaseProcess]]:
    """Start one process per tuple of arguments; kill those that still run two seconds after the end."""
    processes = [CONTEXT.Process(target=target, args=each, daemon=True) for each in arguments]
    try:
        for process in processes:
            process.start()
        yield list(processes)
    finally:
        deadline = time.monotonic() + 2.0
        for process in processes:
            if process.pid is not None:
                process.join(max(deadline - time.monotonic(), 0.0))
                process.kill()
                process.join()


def gather(listener: Listener, roster: Roster, count: int) -> None:
    """Wait until ``count`` peers have a session.

    Raises:
        TimeoutError: fewer peers connected within a minute.
    """
    deadline = time.monotonic() + _PATIENCE_S
    ready = 0
    while ready < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{ready} of {count} processes connected")
        got = listener.receive(0.5)
        if got is not None and isinstance(roster.take(*got), Ready):
            ready += 1
