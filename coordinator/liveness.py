"""Who is absent or late, in real time.

Peers without a session, tasks and requests without an answer, and peers that reconnect too often.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from coordinator.peers import Peers
from coordinator.round_events import PendingTask
from fedmq.clock import Clock
from fedmq.storage.logs import Logger

#: Time to wait for a message before looking at the clock again [s].
_POLL_SECONDS = 0.2
#: Default limit of a wait: a multiple of the longest one known, and its minimum; the first task of a silo may load
#: weights or warm up a GPU [s].
_FACTOR, LEAST_SECONDS = 10.0, 600.0
#: Minimum of the default limit of a task for a silo that has replied before [s].
_LEAST_KNOWN = 60.0
#: Default limit of a task until any silo has replied: a minimum [s], and a time per sample and epoch of training [s].
_LEAST_UNKNOWN, _SAMPLE_SECONDS = 3600.0, 2.0
#: A silo that is lost starts its task again. For how many limits it may be connected with a task, in all its sessions.
_SESSIONS_FACTOR = 3.0
#: Time after which the display names a peer: its longest time, times a factor; a minimum for a silo that has replied
#: before; and one for its first task and for the evaluator [s].
_NAMED_FACTOR, _NAMED_LEAST, _NAMED_FIRST = 2.0, 10.0, 30.0


def default_limit(longest: float, least: float | None = None) -> float:
    """The limit of a wait, by default ten times the longest one known, and at least ten minutes [s]."""
    return max(LEAST_SECONDS if least is None else least, _FACTOR * longest)


class Absences:
    """Real time without a peer; a silo's absences during the same task count together.

    Otherwise a silo that its task makes crash, and that is started again each time, would never be given up.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._before: dict[str, tuple[int, float]] = {}  # number of a silo's task, earlier absences during it [s]

    def begin(self, peer: str, now: float) -> None:
        """A peer is absent at the stopwatch's time ``now`` [s], if not for longer already."""
        self._since.setdefault(peer, now)

    def end(self, peer: str, now: float, pending: Mapping[str, PendingTask]) -> None:
        """A peer is back; ``pending`` are the pending tasks, by silo."""
        if (task := pending.get(peer)) is not None:
            self._before[peer] = task.sequence, self._during(peer, now, task.sequence)
        self._since.pop(peer, None)

    def seconds(self, peer: str, now: float) -> float:
        """Time since a peer was lost [s]; 0 if it is not absent."""
        return now - self._since.get(peer, now)

    def give_up(self, patience: float, now: float, pending: Mapping[str, PendingTask]) -> dict[str, int]:
        """Give up the silos absent for longer than ``patience`` [s] during their pending task; returns its number."""
        given_up = {
            name: pending[name].sequence
            for name in self._since
            if name in pending and self._during(name, now, pending[name].sequence) > patience
        }
        for name in given_up:
            del self._since[name]
        return given_up

    def _during(self, peer: str, now: float, task: int) -> float:
        number, before = self._before.get(peer, (task, 0.0))
        return self.seconds(peer, now) + (before if number == task else 0.0)


def await_silos(
    unheard: Callable[[float], list[str]],
    clock: Clock,
    online: Callable[[str], bool],
    poll: Callable[[], None],
    stop_wanted: Callable[[], bool],
    log: Logger,
) -> None:
    """Wait until all silos can receive the message that the run has ended.

    ``unheard`` names the silos not heard since a stopwatch's time [s] that may return; ``poll`` receives messages.
    """
    since, named = clock.stopwatch(), list[str]()
    while (names := unheard(since)) and not stop_wanted():
        away = [name for name in names if not online(name)]
        if away and away != named:
            log.info("all rounds are done; waiting for silos that are away", silos=", ".join(away))
            named = away
        poll()


def dismiss_all(
    peers: Peers, names: Sequence[str], seconds: float, clock: Clock, log: Logger, gone: Collection[str] = ()
) -> None:
    """Tell all peers that the run is over, including those that connect within ``seconds`` [s] and would get no answer.

    Those ``gone`` are told if they are connected, but not waited for.
    """
    away, until = [name for name in peers.dismiss(names) if name not in gone], clock.stopwatch() + seconds
    if away and seconds:
        log.info(
            f"waiting at most {seconds:g} s for processes that are not connected, to end them", names=", ".join(away)
        )
    while away and clock.stopwatch() < until:
        received = peers.receive(_POLL_SECONDS)
        if received is not None:
            peers.take(*received)
            away = peers.dismiss(away)


@dataclass(frozen=True)
class SlowTask:
    """A task that takes longer than expected."""

    silo: str
    sequence: int
    seconds: float  # real time since the task was sent [s]
    limit: float  # real time after which the task has failed [s]


@dataclass(frozen=True)
class _Sent:
    sequence: int
    at: float


class TaskLimits:
    """Times of the tasks of all silos, and the limits that follow from them.

    Only tasks at connected silos are timed; a silo that is lost starts its task again when it rejoins, but its sessions
    together may not take longer than three limits. A limit of the scenario [s] counts from the sending of the task. A
    default limit, from the times of earlier tasks or the number of samples, counts from the last reply of any silo to
    its task, if that is later: silos that share a machine train one after the other, and a task that waits for its turn
    is not overdue.
    """

    def __init__(self, limit: float | None, samples: Mapping[str, int], epochs: int = 1) -> None:
        self._limit, self._samples, self._epochs = limit, samples, epochs
        self._sent: dict[str, _Sent] = {}
        self._longest: dict[str, float] = {}
        self._slowest = 0.0  # the slowest pace of all replies [s per sample]
        self._overdue: dict[str, _Sent] = {}
        self._last_reply = -math.inf
        self._former: dict[str, tuple[int, float]] = {}  # number of a task, time in sessions before the present one [s]

    @property
    def overdue(self) -> tuple[str, ...]:
        """Silos whose last task exceeded its limit, and that have neither replied nor rejoined since."""
        return tuple(sorted(self._overdue))

    def sent(self, silo: str, sequence: int, now: float) -> None:
        """A task was sent to a silo at the stopwatch's time ``now`` [s]."""
        self._sent[silo] = _Sent(sequence, now)
        if self._former.get(silo, (sequence, 0.0))[0] != sequence:
            del self._former[silo]

    def replied(self, silo: str, sequence: int, now: float) -> bool:
        """A silo replied, in time or late; returns whether its last task was overdue.

        A reply to another task than its last one changes nothing.
        """
        late = self._overdue.get(silo)
        task = late or self._sent.get(silo)
        if task is None or task.sequence != sequence:
            return False
        self._sent.pop(silo, None)
        self._overdue.pop(silo, None)
        longest = self._longest[silo] = max(now - task.at, self._longest.get(silo, 0.0))
        self._slowest = max(self._slowest, longest / max(1, self._samples[silo]))
        self._last_reply = now
        return late is not None

    def evaluated(self, now: float) -> None:
        """A silo answered an evaluation request; tasks that waited for it are not overdue."""
        self._last_reply = now

    def lost(self, silo: str, now: float) -> None:
        """A silo was lost; its time with the task counts if it gets the same task again."""
        if (task := self._sent.get(silo)) is not None:
            self._former[silo] = task.sequence, self._in_all(silo, now - task.at)
        self.forget(silo)

    def forget(self, silo: str) -> None:
        """A silo's task has failed, or the silo has rejoined."""
        self._sent.pop(silo, None)
        self._overdue.pop(silo, None)

    def _in_all(self, silo: str, seconds: float) -> float:
        """Time with a silo's task in all its sessions, given that in the present one [s]."""
        return seconds + self._former.get(silo, (0, 0.0))[1]

    def seconds(self, silo: str, now: float) -> float | None:
        """Real time since a silo's task was sent [s]; None if the silo has none."""
        return now - self._sent[silo].at if silo in self._sent else None

    def limit(self, silo: str) -> float:
        """The limit of a silo's task [s]."""
        if self._limit is not None:
            return self._limit
        if silo in self._longest:
            return default_limit(self._longest[silo], _LEAST_KNOWN)
        samples = self._samples[silo]
        if self._longest:
            return default_limit(self._slowest * samples)
        return max(_LEAST_UNKNOWN, _SAMPLE_SECONDS * self._epochs * samples)

    def exceed(self, now: float) -> list[SlowTask]:
        """Tasks whose limit is over; they count as :attr:`overdue` from now on, and are not returned again."""
        quiet = math.inf if self._limit is not None else now - self._last_reply
        tasks = self._tasks(now)
        exceeded = [
            task
            for task in tasks
            if min(task.seconds, quiet) > task.limit
            or (task.silo in self._former and self._in_all(task.silo, task.seconds) > _SESSIONS_FACTOR * task.limit)
        ]
        for task in exceeded:
            self._overdue[task.silo] = self._sent.pop(task.silo)
        return exceeded

    def slow(self, now: float) -> tuple[SlowTask, ...]:
        """Tasks that take longer than expected, longest first, for the display."""
        named = [task for task in self._tasks(now) if task.seconds > self._expected(task.silo)]
        return tuple(sorted(named, key=lambda task: -task.seconds))

    def _tasks(self, now: float) -> list[SlowTask]:
        return [SlowTask(silo, task.sequence, now - task.at, self.limit(silo)) for silo, task in self._sent.items()]

    def _expected(self, silo: str) -> float:
        longest = self._longest.get(silo)
        return _NAMED_FIRST if longest is None else max(_NAMED_LEAST, _NAMED_FACTOR * longest)


class AnswerLimit:
    """Tracks how long evaluation requests have gone unanswered: by the evaluator, or by all silos.

    The evaluator answers one request after the other, so the time counts from the last answer, from the first pending
    request, or from its last connection, whichever is latest. Without a limit of the scenario [s] it is that of
    :func:`default_limit` for the longest time until an answer.
    """

    def __init__(self, limit: float | None) -> None:
        self._limit, self._longest, self.exceeded = limit, 0.0, False
        self._since: float | None = None

    def requested(self, now: float) -> None:
        """A request was sent at the stopwatch's time ``now`` [s]."""
        self._since = now if self._since is None else self._since

    def answered(self, now: float, *, more: bool) -> None:
        """An answer arrived; ``more`` says whether further ones are outstanding."""
        if self._since is not None:
            self._longest = max(self._longest, now - self._since)
        self._since, self.exceeded = now if more else None, False

    def connected(self, now: float) -> None:
        """The evaluator connected again; it starts over with the pending requests."""
        self._since, self.exceeded = None if self._since is None else now, False

    def disconnected(self, now: float) -> None:
        """The evaluator is not connected at ``now``: this time does not count."""
        self._since = None if self._since is None else now

    @property
    def limit(self) -> float:
        """Real time after which the coordinator stops waiting for an answer [s]."""
        return default_limit(self._longest) if self._limit is None else self._limit

    def seconds(self, now: float) -> float:
        """Real time without an answer [s]; 0 if none is outstanding."""
        return 0.0 if self._since is None else now - self._since

    def exceed(self, now: float) -> bool:
        """Whether the limit is over; whoever has not answered then counts as given up."""
        self.exceeded = self.exceeded or self.seconds(now) > self.limit
        return self.exceeded

    def is_slow(self, now: float) -> bool:
        """Whether the evaluator takes longer than expected, so that the display names it."""
        return self.seconds(now) > max(_NAMED_FIRST, _NAMED_FACTOR * self._longest)


class ReconnectThrottle:
    """Limits reconnects: each one has all open requests sealed and queued for the peer, including models.

    The first reconnect is served immediately; another one within a beat is served when the beat is over.
    """

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self.waiting: set[str] = set()  # peers whose reconnect is delayed

    def must_wait(self, name: str, now: float, beat: float) -> bool:
        """Whether a peer that is ready at ``now`` [s] has to wait, as it was ready less than a ``beat`` [s] ago."""
        if now - self._last.get(name, -math.inf) < beat:
            self.waiting.add(name)
            return True
        self.waiting.discard(name)
        self._last[name] = now if name in self._last else -math.inf
        return False

    def expired(self, now: float, beat: float) -> list[str]:
        """Peers whose delay is over; arguments as in :meth:`must_wait`."""
        return [name for name in sorted(self.waiting) if now - self._last[name] >= beat]
