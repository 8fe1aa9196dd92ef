"""A coordinator's end and silo processes for the benchmarks of messages: real keys, logs, links and sessions."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from coordinator.peers import Ready
from coordinator.roster import Roster
from fedmq.clock import WallClock
from fedmq.wire.channel import Channel
from fedmq.wire.keys import init_keys, load_accepted, load_identity
from fedmq.wire.layout import Layout
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import COORDINATOR
from fedmq.wire.transports.base import Listener
from fedmq.wire.transports.registry import listen

RUN = "bench"
#: The size of RCSR's adapters and heads on CLIP: 12.12 MB of float32.
PARAMETERS = 3_033_600
MEGABYTES = PARAMETERS * 4 / 1e6
_PATIENCE_S = 60.0
_MAX_BODY = 1 << 26

#: Started as the simulator starts its silos, but from a plain forkserver: it has to know this package.
CONTEXT = multiprocessing.get_context("forkserver")


def two_branches(parameters: int = PARAMETERS) -> Layout:
    """A layout of that many float32, half of them of either modality."""
    half = parameters // 2
    return Layout.of([("text.weight", (half,), "float32"), ("visual.weight", (parameters - half,), "float32")])


def link_of(uri: str, keys: Path, out: Path, name: str) -> Channel:
    """A silo's link; what it sends is stamped with the machine's monotonic clock, which all processes share."""
    clock = WallClock()
    log = MessageLog(out / f"{name}.jsonl", name, clock)
    return Channel(uri, load_identity(keys, name), load_accepted(keys), RUN, log, clock, now=time.monotonic)


@contextmanager
def coordinator_end(bind: str, folder: Path, names: Sequence[str]) -> Iterator[tuple[Listener, Roster, MessageLog]]:
    """Keys for everybody, and the coordinator's listener, roster and log.

    Args:
        bind: URI.
        folder: empty; gets ``keys`` and the logs.
        names: of the peers.
    """
    keys = folder / "keys"
    init_keys(keys, (COORDINATOR, *names))
    clock = WallClock()
    listener = listen(bind)
    log = MessageLog(folder / "coordinator.jsonl", COORDINATOR, clock)
    try:
        yield (
            listener,
            Roster(
                listener, load_identity(keys, COORDINATOR), load_accepted(keys), RUN, log, clock, max_body=_MAX_BODY
            ),
            log,
        )
    finally:
        listener.close()
        log.close()


@contextmanager
def started(target: Callable[..., None], arguments: Sequence[tuple[object, ...]]) -> Iterator[list[BaseProcess]]:
    """One process per tuple of arguments; whoever still runs at the end is killed."""
    processes = [CONTEXT.Process(target=target, args=each, daemon=True) for each in arguments]
    try:
        for process in processes:
            process.start()
        yield list(processes)
    finally:
        for process in processes:
            if process.pid is not None:
                process.join(2.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def gather(listener: Listener, roster: Roster, count: int) -> None:
    """Wait until that many peers have a session.

    Raises:
        TimeoutError: they did not come.
    """
    deadline = time.monotonic() + _PATIENCE_S
    ready = 0
    while ready < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{ready} of {count} processes connected")
        got = listener.receive(0.5)
        if got is not None and isinstance(roster.take(*got), Ready):
            ready += 1
