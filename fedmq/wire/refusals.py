"""Refusals: what the operator reads while a channel has no session, and what is logged about refused frames.

A limited number of unauthenticated frames per minute is logged one by one, the rest as one count. After a restart,
messages of sessions with the earlier process are counted separately.
"""

from __future__ import annotations

import math
from collections import Counter

from fedmq.clock import Clock
from fedmq.errors import RemoteWireError
from fedmq.wire.handshake import Accepted, HelloRefusedError
from fedmq.wire.keys import Identity, words
from fedmq.wire.limits import BoundedDict
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import COORDINATOR, Header, Kind, Reason, ShortHeader
from fedmq.wire.transports.tcp import unknown_host

#: Name in the log of a sender that has not proven who it is.
UNKNOWN = "unknown"
#: Refusals logged per minute, of one connection and of all.
PER_CONNECTION = 20
PER_MINUTE = 100
_WINDOW_SECONDS = 60.0
#: Time after which the messages of former sessions are noted as one count [s]; most arrive together.
_FORMER_SECONDS = 10.0
#: Maximum number of sessions of this process that are remembered; the oldest are forgotten.
_MAX_SESSIONS = 4096


class RefusalLog:
    """Refusals of frames whose sender is unproven; anyone who reaches the port can cause them at any rate.

    Args:
        log: the message log of this process.
        clock: clock for the windows of one minute.
    """

    def __init__(self, log: MessageLog, clock: Clock) -> None:
        self._log, self._clock = log, clock
        self._began = -math.inf
        self._logged: Counter[bytes] = Counter()
        self._unlogged = 0

    def add(self, connection: bytes, error: RemoteWireError, size: int) -> None:
        """Log a refusal, or count it if enough of them have been logged in this minute.

        Args:
            connection: identifies the connection on which the frames arrived.
            error: why they were refused.
            size: size of the frames [bytes].
        """
        now = self._clock.stopwatch()
        if now - self._began >= _WINDOW_SECONDS:
            self.flush()
            self._began = now
            self._logged.clear()
        if self._logged[connection] >= PER_CONNECTION or self._logged.total() >= PER_MINUTE:
            self._unlogged += 1
            return
        self._logged[connection] += 1
        self._log.refused(UNKNOWN, error.reason, error.detail, size)

    def flush(self) -> None:
        """Log the number of refusals that were counted since the last call."""
        if self._unlogged:
            self._log.note(LogEvent.REFUSALS_COUNTED, count=self._unlogged)
        self._unlogged = 0


class StaleSessions:
    """Messages of sessions that peers had with an earlier process of this coordinator, which cannot open them.

    A restart leaves such messages in the peers' queues. They are dropped like any message without a session. So are
    those that arrived before their connection broke, but are read after this process could not send to their peer.

    Args:
        log: the message log of this process.
        clock: clock for the interval between two notes.
        restarted: whether there was an earlier process.
    """

    def __init__(self, log: MessageLog, clock: Clock, *, restarted: bool) -> None:
        self._log, self._clock, self._restarted = log, clock, restarted
        self._known, self._broken = BoundedDict[bytes, None](_MAX_SESSIONS), BoundedDict[bytes, None](_MAX_SESSIONS)
        self._dropped, self._first = 0, math.inf

    def know(self, session: bytes) -> None:
        """Remember a session of this process, whose refused messages are not of a former one."""
        self._known[session] = None

    def end(self, session: bytes) -> None:
        """The connection of a session is broken; what arrived before that may still be queued."""
        self._broken[session] = None

    def drop(self, header: Header | ShortHeader | None, error: RemoteWireError) -> bool:
        """Whether an unauthenticated message is of a former or broken session; those of former ones are counted."""
        if header is not None and header.session in self._broken and error.reason == Reason.UNKNOWN_SESSION:
            return True
        if not self._restarted or header is None or not header.session or header.session in self._known:
            return False
        ready = isinstance(header, Header) and header.kind is Kind.READY
        if error.reason != (Reason.UNEXPECTED if ready else Reason.UNKNOWN_SESSION):
            return False
        self._dropped, self._first = self._dropped + 1, min(self._first, self._clock.stopwatch())
        return True

    def note(self, *, all_: bool = False) -> None:
        """Log the number of messages dropped since the last note, if some time has passed since the first of them."""
        if self._dropped and (all_ or self._clock.stopwatch() - self._first >= _FORMER_SECONDS):
            self._log.note(LogEvent.STALE_SESSIONS, count=self._dropped)
            self._dropped, self._first = 0, math.inf


#: What to do about another scenario.
SAME_SCENARIO = "both sides need the same file and the same --set and --seed"


def silent(uri: str, seconds: float) -> str:
    """The line about a coordinator that has not answered for a time [s]."""
    why = "no coordinator listens there yet, a firewall is in between, or it is busy; it keeps trying"
    if host := unknown_host(uri):
        why = f"the name {host} is unknown on this machine"
    return f"no answer from {uri} for {seconds:.0f} s: {why}"


def foreign(uri: str, accepted: Accepted) -> str:
    """The line about a process that has another key than the accepted one of the coordinator."""
    key = accepted.get(COORDINATOR)
    return (
        f"what listens at {uri} does not have the coordinator's key in the folder accepted/ here "
        f"({'which has none' if key is None else words(key)}): it is another process, or the coordinator has a new "
        "key; accept that with `fedmq keys accept`, and this process connects"
    )


def refused(uri: str, identity: Identity, refusal: HelloRefusedError, differing: str) -> str:
    """The line about a coordinator that refuses the handshake.

    Args:
        uri: URI at which it listens.
        identity: this process.
        refusal: its answer.
        differing: keys of the scenario with other values there, if known.
    """
    match refusal.reason:
        case Reason.UNKNOWN_SENDER:
            ask = f"its operator accepts it with `fedmq keys accept` ({words(identity)})"
            ask += ", or this process was started with the wrong key file (--keys)"
            return f"the coordinator at {uri} does not accept this key of {identity.name}: {ask}"
        case Reason.WRONG_RUN:
            which = f"{refusal.detail}{f', with other values of {differing}' if differing else ''}"
            return f"the coordinator at {uri} has another scenario: {which}; {SAME_SCENARIO}"
        case _:
            return f"the coordinator at {uri} refuses the handshake: {refusal.reason}: {refusal.detail}"
