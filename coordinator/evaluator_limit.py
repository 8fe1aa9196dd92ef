"""Time limit for the evaluator's answers, so that an evaluator that only sends heartbeats cannot stall the run."""

from __future__ import annotations

#: Default limit: a multiple of the longest time until an answer, and the minimum of the default limit [s].
_FACTOR, LEAST_SECONDS = 10.0, 600.0
#: Time after which the display names the evaluator: a factor times its longest time, and a fixed minimum [s].
_NAMED_FACTOR, _NAMED_LEAST = 2.0, 30.0


class EvaluatorLimit:
    """Tracks how long a request to the evaluator has gone unanswered.

    The evaluator answers one request after the other, so the time counts from its last answer, from the first pending
    request, or from its last connection, whichever is latest.

    Args:
        limit: the scenario's limit [s]; None for ten times its longest time until an answer, at least ten minutes.

    Attributes:
        exceeded: the evaluator was given up, and has neither answered nor connected again since.
    """

    def __init__(self, limit: float | None) -> None:
        self._limit, self._longest, self.exceeded = limit, 0.0, False
        self._since: float | None = None

    def requested(self, now: float) -> None:
        """A request was sent at the stopwatch's time ``now`` [s]."""
        self._since = now if self._since is None else self._since

    def answered(self, now: float, *, more: bool) -> None:
        """The evaluator answered; ``more`` says whether it owes further answers."""
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
        """Real time after which the evaluator is given up [s]."""
        return max(LEAST_SECONDS, _FACTOR * self._longest) if self._limit is None else self._limit

    def seconds(self, now: float) -> float:
        """Real time without an answer [s]; 0 if it owes none."""
        return 0.0 if self._since is None else now - self._since

    def exceed(self, now: float) -> bool:
        """Whether the limit is over; the evaluator then counts as given up."""
        self.exceeded = self.exceeded or self.seconds(now) > self.limit
        return self.exceeded

    def is_slow(self, now: float) -> bool:
        """Whether the evaluator takes longer than expected, so that the display names it."""
        return self.seconds(now) > max(_NAMED_LEAST, _NAMED_FACTOR * self._longest)
