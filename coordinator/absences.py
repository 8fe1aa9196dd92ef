"""For how long peers have been absent, and the waits for absent peers at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from coordinator.peers import Peers
from coordinator.rounds import PendingTask
from fedmq.clock import Clock
from fedmq.errors import RemoteWireError
from fedmq.storage.logs import Logger

_POLL_SECONDS = 0.2


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
        """Give up the silos that were absent for longer than ``patience`` [s] during their pending task.

        Returns:
            The numbers of their tasks, by silo.
        """
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

    Args:
        unheard: silos that have not been heard since a stopwatch's time [s], and may return.
        clock: the run's clock.
        online: whether messages can be sent to a silo.
        poll: receives messages; waits a fraction of a second if nothing arrives.
        stop_wanted: true ends the wait.
        log: the log for operators.
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
    """Tell all peers that the run is over, also those that connect a little later: nobody answers them afterwards.

    Args:
        peers: the run's peers.
        names: those to be told.
        seconds: maximum time to wait for those that are not connected [s].
        clock: the run's clock.
        log: the log for operators.
        gone: those that are told if they are connected, but not waited for.
    """
    away, until = [name for name in peers.dismiss(names) if name not in gone], clock.stopwatch() + seconds
    if away and seconds:
        log.info(
            f"waiting at most {seconds:g} s for processes that are not connected, to end them", names=", ".join(away)
        )
    while away and clock.stopwatch() < until:
        try:
            received = peers.receive(_POLL_SECONDS)
        except RemoteWireError as error:
            peers.refuse("unknown", error, 0)
            continue
        if received is not None:
            peers.take(*received)
            away = peers.dismiss(away)
