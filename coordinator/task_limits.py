"""Limits of tasks in real time, so that a silo that sends heartbeats but never replies cannot stall the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

#: Default limit of a task: a multiple of the longest one known.
_FACTOR = 10.0
#: Minimum of the default limit for a silo that has replied before [s].
_LEAST = 60.0
#: Minimum of the default limit for a silo that has not replied yet: its first task may load weights or warm up a GPU
#: [s].
_LEAST_FIRST = 600.0
#: Default limit until any silo has replied: a minimum [s], and a time per sample and epoch of local training [s].
_LEAST_UNKNOWN, _SAMPLE_SECONDS = 3600.0, 2.0
#: A silo that is lost starts its task again. For how many limits it may be connected with a task, in all its sessions.
_SESSIONS_FACTOR = 3.0
#: Time after which the display names a silo: its longest task, times a factor; a fixed time for its first task [s].
_NAMED_FACTOR, _NAMED_LEAST, _NAMED_FIRST = 2.0, 10.0, 30.0


@dataclass(frozen=True)
class SlowTask:
    """A task that takes longer than expected.

    Args:
        silo: the silo.
        sequence: number of its task.
        seconds: real time since the task was sent [s].
        limit: real time after which the task has failed [s].
    """

    silo: str
    sequence: int
    seconds: float
    limit: float


@dataclass(frozen=True)
class _Sent:
    sequence: int
    at: float


class TaskLimits:
    """Times of the tasks of all silos, and the limits that follow from them.

    Only tasks at connected silos are timed; a silo that is lost starts its task again when it rejoins, but its sessions
    together may not take longer than three limits. A limit of the scenario counts from the sending of the task. A
    default limit counts from the last reply of any silo to its task, if that is later: silos that share a machine train
    one after the other, and a task that waits for its turn is not overdue.

    Args:
        limit: limit of every task [s]; None derives limits from the times of earlier tasks.
        samples: training samples by silo, for the pace of silos without an earlier task.
        epochs: epochs of local training per task.
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
            return max(_LEAST, _FACTOR * self._longest[silo])
        samples = self._samples[silo]
        if self._longest:
            return max(_LEAST_FIRST, _FACTOR * self._slowest * samples)
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
