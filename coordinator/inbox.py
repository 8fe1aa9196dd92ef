"""Reads what the peers of a run send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from coordinator.events import Failed
from coordinator.fault_injection import FaultInjector
from coordinator.peers import Peers, Ready, Unusable
from fedmq.clock import Clock
from fedmq.errors import RemoteWireError
from fedmq.wire.channel import BEAT_SECONDS
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import Message

#: Messages received in a row before events are handled, so that a peer that floods the socket cannot stall the run.
#: Until the queue is empty no peer counts as silent, because its messages may still be queued.
MESSAGES_AT_ONCE = 256


class Inbox:
    """The messages of a run's peers, after the fault injector.

    Args:
        roster: the run's peers.
        log: the coordinator's message log.
        clock: the run's clock.
        fault_injector: loses, delays and damages messages.

    Attributes:
        caught_up: stopwatch time at which no message was left to read, most recently [s].
    """

    def __init__(self, roster: Peers, log: MessageLog, clock: Clock, fault_injector: FaultInjector) -> None:
        self._roster, self._log, self._clock, self._fault_injector = roster, log, clock, fault_injector
        self.caught_up = clock.stopwatch()

    def receive(self, wait: float) -> Iterator[tuple[Message | Ready | Unusable | Failed, int | None]]:
        """Read a limited number of messages; wait at most ``wait`` [s] for the first one.

        Yields:
            A message, a peer that is ready, an unusable message, or a task that fails because its reply is lost; with
            the number of its log record, None if it has none. The next message is read after this one is handled.
        """
        for _ in range(MESSAGES_AT_ONCE):
            began = self._clock.stopwatch()
            try:
                received = self._roster.receive(wait)
            except RemoteWireError as error:
                self._roster.refuse("unknown", error, 0)
                continue
            if received is None:
                now = self._clock.stopwatch()
                if now - began < wait + BEAT_SECONDS:  # otherwise this process stood still: messages may be unread
                    self.caught_up = now
                return
            wait = 0.0
            arrived, lost = self._fault_injector.incoming(*received)
            for failed in lost:
                yield failed, failed.cause
            for address, frames in arrived:
                taken, record = self._taken(address, frames)
                if taken is not None:
                    yield taken, record

    def _taken(self, address: bytes, frames: Sequence[Any]) -> tuple[Message | Ready | Unusable | None, int | None]:
        """What the roster makes of frames, and its log record; messages within this process have none."""
        before = self._log.records
        taken = self._roster.take(address, frames)
        return taken, self._log.records - 1 if self._log.records > before else None
