"""The channels of several peers of one process, on one thread and one connection."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedmq.errors import RemoteWireError
from fedmq.wire.channel import STEP_SECONDS, Channel
from fedmq.wire.messages import Message
from fedmq.wire.transports.base import QUEUE
from fedmq.wire.transports.registry import connect_shared
from fedmq.wire.transports.shared_connections import Branch

#: Handshakes in progress at a time, so that the coordinator answers each before it is repeated.
_HANDSHAKES = 16

#: What a peer receives: its name, and a message.
Item = tuple[str, Message]


class ChannelGroup:
    """Channels that share a thread and a connection.

    Args:
        uri: URI at which the coordinator listens, with the prefix ``shared+``.
        open_channel: ``(name, deliver)``: makes the channel of a peer that delivers what it receives to ``deliver``.
        names: the peers.
    """

    def __init__(
        self, uri: str, open_channel: Callable[[str, Callable[[Message], None]], Channel], names: Sequence[str]
    ) -> None:
        self._uri = uri
        self._inbox: queue.SimpleQueue[Item | BaseException | None] = queue.SimpleQueue()
        self.channels: Mapping[str, Channel] = {name: open_channel(name, self._deliver_to(name)) for name in names}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run_thread, name="links", daemon=True)

    def _deliver_to(self, name: str) -> Callable[[Message], None]:
        return lambda item: self._inbox.put((name, item))

    # ------------------------------------------------------------------------------------- for the training thread
    def start(self) -> None:
        """Start connecting."""
        self._thread.start()

    def receive(self) -> Item | None:
        """The next message of any peer, with the peer's name; None when all channels have finished.

        Raises:
            Exception: the error that ended the thread.
        """
        item = self._inbox.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self, patience_s: float = 5.0) -> None:
        """Send the queued messages, then end the thread; waits at most ``patience_s`` [s]."""
        self._closing.set()
        for channel in self.channels.values():
            channel.begin_closing()
        if self._thread.ident is not None:
            self._thread.join(patience_s)
        for channel in self.channels.values():
            channel.close(0.0)

    # ------------------------------------------------------------------------------------------------- the thread
    def _run_thread(self) -> None:
        try:
            shared = connect_shared(self._uri, queue=QUEUE * len(self.channels))
            try:
                links = [_Link(each, shared.branch(number)) for number, each in enumerate(self.channels.values())]
                for link in links:
                    link.channel.attach(link.branch)
                checked = -math.inf
                while links:
                    now = time.monotonic()
                    everyone = now - checked >= STEP_SECONDS
                    checked = now if everyone else checked
                    links = _step(links, everyone=everyone)
                    with contextlib.suppress(RemoteWireError):  # not two frames: their silo is unknown
                        shared.pump(STEP_SECONDS)
            finally:
                shared.close()
        except BaseException as error:
            self._inbox.put(error)
        else:
            self._inbox.put(None)


@dataclass(frozen=True)
class _Link:
    channel: Channel
    branch: Branch


def _step(links: list[_Link], *, everyone: bool) -> list[_Link]:
    """Let the channels receive and send; returns those that are still active.

    Args:
        links: the channels that are still active.
        everyone: also those without messages, which then check the time.
    """
    handshakes = 0
    for link in links:
        channel = link.channel
        handshakes += not channel.has_session
        if not channel.has_session and handshakes > _HANDSHAKES:
            continue  # begun when others are complete
        if everyone or link.branch.arrived or channel.has_outgoing or not channel.has_session:
            channel.step(link.branch, 0.0)
    # Only channels with a session receive the end of the run; the others would wait for a coordinator that is gone.
    over = any(link.channel.stopped for link in links)
    return [link for link in links if not (link.channel.finished or (over and not link.channel.has_session))]
