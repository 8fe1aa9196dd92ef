"""The world of a simulation: its time, its network and its disk. One thread, no sockets, no waiting.

Time passes only while the coordinator waits for a message: :class:`SimulatedListener` then runs what is due, e.g. the
arrival of a message at a silo, or the end of a task. All chance comes from one generator.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import math
import os
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from fedmq.clock import VirtualClock
from fedmq.wire.codec import BytesLike
from fedmq.wire.transports.base import Connection, Listener, Transport

COORDINATOR = "coordinator"
_BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
#: Simulated time that a message takes, shortest and longest [s].
_TRAVEL = (0.002, 0.02)
#: Simulated time [s] and steps without a merge after which a run counts as stuck.
_MOST_SECONDS, _MOST_STEPS = 1000.0, 100_000


class Killed(BaseException):
    """Stands for SIGKILL of the process that is acting; only the simulation catches it."""


@dataclass(frozen=True)
class Weather:
    """What happens to messages until a time; probabilities per message."""

    until: float = 0.0  # simulated time at which the network becomes faultless, so that every run ends [s]
    lost: float = 0.0  # is lost
    late: float = 0.0  # arrives up to ``latest`` seconds late, perhaps after a later message
    doubled: float = 0.0  # arrives twice
    damaged: float = 0.0  # one bit of it flips
    latest: float = 8.0  # longest delay [s]


@dataclass(frozen=True)
class DiskFault:
    """A write, counted per process and kind over all its lives, at which the process dies or its disk is full."""

    process: str  # name of the process
    kind: str  # kind of the file: ``log``, ``metrics``, ``checkpoint``, or ``state`` of a silo
    write: int  # number of the write
    dies: bool  # whether the process dies within the write, or else gets an error
    share: float  # share of the bytes of the write that reach the disk
    times: int = 1  # number of writes in a row that fail


@dataclass
class World:
    """Time, chance, network and disk."""

    chance: random.Random  # the source of all randomness
    weather: Weather = field(default_factory=Weather)  # what happens to messages
    disk: tuple[DiskFault, ...] = ()  # the faults of writes
    stuck: Callable[[], str] = lambda: ""  # says who waits for what
    now: float = 0.0
    progress_at: float = 0.0  # time of the last merge [s]
    steps: int = 0  # looks at the clock and acts of processes since then
    step_s: float = 0.0
    acting: str = COORDINATOR
    writes: dict[tuple[str, str], int] = field(default_factory=dict)
    struck: list[str] = field(default_factory=list)
    dying: Callable[[], None] = lambda: None
    listener: SimulatedListener | None = None
    connections: dict[bytes, SimulatedConnection] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._due: list[tuple[float, int, str, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._arrivals: dict[tuple[bytes, str], float] = {}

    def at(self, time: float, actor: str, act: Callable[[], None]) -> None:
        """Have a process act at a time."""
        heapq.heappush(self._due, (max(time, self.now), next(self._numbers), actor, act))

    def after(self, seconds: float, actor: str, act: Callable[[], None]) -> None:
        """Have a process act after a time."""
        self.at(self.now + seconds, actor, act)

    def pass_until(self, time: float, enough: Callable[[], object] = lambda: False) -> None:
        """Let time pass up to ``time`` [s], or until a condition holds."""
        self.watch()
        while not enough() and self._due and self._due[0][0] <= time:
            self.now, _, actor, act = heapq.heappop(self._due)
            self.watch()
            with self.as_process(actor):
                act()
        if not enough():
            self.now = max(self.now, time)

    def watch(self) -> None:
        """Fail if too much has happened since the last merge."""
        self.steps += 1
        seconds = self.now - self.progress_at
        assert seconds < _MOST_SECONDS, f"no merge for {seconds:.0f} s; {self.stuck()}"
        assert self.steps < _MOST_STEPS, f"no merge in {self.steps} steps; {self.stuck()}"

    @contextmanager
    def as_process(self, actor: str) -> Iterator[None]:
        """What happens within the block is done by a process."""
        self.acting, before = actor, self.acting
        try:
            yield
        finally:
            self.acting = before

    def address(self, connection: SimulatedConnection) -> bytes:
        """A new address of a connection; what is in transit from and to its former one is lost."""
        self.connections.pop(connection.address, None)
        address = next(self._numbers).to_bytes(8, "big")
        self.connections[address] = connection
        return address

    def carry(
        self, way: tuple[bytes, str], frames: Sequence[BytesLike], deliver: Callable[[list[memoryview]], None]
    ) -> None:
        """Bring a message to its receiver, as the weather allows: in order, unless it is late.

        Args:
            way: the peer's address and the direction.
            frames: the message.
            deliver: called with it on its arrival.
        """
        chance, weather = self.chance, self.weather
        content = [bytes(frame) for frame in frames]
        draws = [chance.random() for _ in range(4)] if self.now < weather.until else [1.0] * 4
        if draws[0] < weather.lost:
            return
        if draws[1] < weather.damaged:
            place = chance.randrange(sum(map(len, content)) * 8)
            content = _flipped(content, place)
        for _ in range(1 + (draws[2] < weather.doubled)):
            arrival = max(self.now + chance.uniform(*_TRAVEL), self._arrivals.get(way, 0.0))
            if draws[3] < weather.late:
                arrival += chance.uniform(0, weather.latest)
            else:
                self._arrivals[way] = arrival
            self.at(arrival, self.acting, lambda: deliver([memoryview(frame) for frame in content]))

    def write(self, kind: str, size: int, begin: Callable[[int], None]) -> None:
        """Count a write of a process; a fault of the disk has it die or fail in the middle.

        Args:
            kind: kind of the file.
            size: bytes to be written.
            begin: writes the first so many bytes.
        """
        who = self.acting, kind
        number = self.writes[who] = self.writes.get(who, 0) + 1
        for fault in self.disk:
            if (fault.process, fault.kind) == who and fault.write <= number < fault.write + fault.times:
                begin(int(size * fault.share))
                what = "dies" if fault.dies else "has a full disk"
                self.struck.append(f"{self.acting} {what} at write {number} of {kind}")
                if fault.dies:
                    self.dying()
                    raise Killed
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _flipped(content: list[bytes], place: int) -> list[bytes]:
    """The frames with one bit flipped."""
    made = []
    for frame in content:
        if 0 <= place < 8 * len(frame):
            damaged = bytearray(frame)
            damaged[place // 8] ^= 1 << place % 8
            frame = bytes(damaged)  # noqa: PLW2901
        place -= 8 * len(frame)
        made.append(frame)
    return made


class SimulatedClock(VirtualClock):
    """The run's virtual time; the world's time is the real one."""

    def __init__(self, world: World, start: float = 0.0) -> None:
        super().__init__(start)
        self._world = world

    def stopwatch(self) -> float:
        return self._world.now

    def utc(self, at: float | None = None) -> str:
        past = 0.0 if at is None else self._world.now - at
        wall = _BEGIN + timedelta(seconds=self._world.now + self._world.step_s - past)
        return wall.isoformat(timespec="milliseconds")

    def pause(self, seconds: float) -> None:
        self._world.now += seconds


class SimulatedListener(Listener):
    """The coordinator's end."""

    def __init__(self, world: World, uri: str) -> None:
        self.uri, self._world = uri, world
        self._arrived: deque[tuple[bytes, list[memoryview]]] = deque()
        world.listener = self
        for connection in list(world.connections.values()):
            connection.connect()

    def receive(self, timeout_s: float | None = None) -> tuple[bytes, list[memoryview]] | None:
        until = math.inf if timeout_s is None else self._world.now + timeout_s
        self._world.pass_until(until, lambda: self._arrived)
        return self._arrived.popleft() if self._arrived else None

    def arrive(self, address: bytes, frames: list[memoryview]) -> None:
        """A message of a peer arrives, unless its connection or this listener is gone."""
        if address in self._world.connections and self._world.listener is self:
            self._arrived.append((address, frames))

    def send(self, peer: bytes, frames: Sequence[BytesLike]) -> bool:
        if self._world.listener is not self or peer not in self._world.connections:
            return False

        def deliver(arrived: list[memoryview]) -> None:
            if (connection := self._world.connections.get(peer)) is not None:
                connection.arrive(arrived)

        self._world.carry((peer, "down"), frames, deliver)
        return True

    def cut(self, peer: bytes) -> None:
        if (connection := self._world.connections.get(peer)) is not None:
            connection.connect()

    def close(self) -> None:
        if self._world.listener is self:
            self._world.listener = None


class SimulatedConnection(Connection):
    """A peer's end.

    Args:
        uri: the listener's URI.
        wake_owner: called when a message arrives.
    """

    def __init__(self, world: World, uri: str, owner: str, wake_owner: Callable[[], None]) -> None:
        self.uri, self._world, self._owner, self._wake_owner = uri, world, owner, wake_owner
        self._arrived: deque[list[memoryview]] = deque()
        self._count, self.address = 0, b""
        self.connect()

    def connect(self) -> None:
        """The connection, if there is one, breaks, and a new one is made."""
        self._arrived.clear()
        self.address = self._world.address(self)
        self._count += self._world.listener is not None

    def receive(self, timeout_s: float | None = None) -> list[memoryview] | None:
        return self._arrived.popleft() if self._arrived else None

    def arrive(self, frames: list[memoryview]) -> None:
        """A message of the coordinator arrives."""
        self._arrived.append(frames)
        with self._world.as_process(self._owner):
            self._wake_owner()

    def wake(self) -> None: ...

    def send(self, frames: Sequence[BytesLike], timeout_s: float | None = 0.0) -> bool:
        listener, address = self._world.listener, self.address
        if listener is not None:
            self._world.carry((address, "up"), frames, lambda arrived: listener.arrive(address, arrived))
        return True

    def established(self) -> int:
        return self._count

    def reconnect(self) -> None:
        self.connect()

    def close(self) -> None:
        self._world.connections.pop(self.address, None)


def transport(world: Callable[[], World]) -> Transport:
    """The transport by which a coordinator listens in the present world."""

    def refuse(*_: object) -> Connection:
        raise AssertionError("peers of a simulation make their connections themselves")

    return Transport("simulated://NAME", lambda *_: None, lambda uri, *_: SimulatedListener(world(), uri), refuse)
