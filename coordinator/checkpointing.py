"""Checkpoints of a running coordinator: what goes into one, and what silos may forget once it is there."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from coordinator import checkpoint as checkpoints
from coordinator.counters import Counters
from coordinator.fault_injection import FaultInjector
from coordinator.peers import Peers
from coordinator.rounds import Rounds
from coordinator.run_context import RunContext
from fedmq.clock import Clock
from fedmq.errors import RunError
from fedmq.federation.protocol import State
from fedmq.wire.log_records import NoteKind
from fedmq.wire.message_log import MessageLog

#: A full disk may be full for a moment only; after that many refusals the run stops, to be resumed.
_TRIES = 3
#: Real seconds between them.
_PAUSE_SECONDS = 0.2


class Checkpointing:
    """Writes the run's checkpoints.

    Args:
        run_context: of the run.
        clock: the run's.
        log: the coordinator's message log.
        counters: those of earlier processes of this run included.
        roster: counts the messages of this one.
        fault_injector: knows when tasks were handed out, and may refuse the disk.
        settled: number of each silo's last merged task, as the checkpoint that was resumed has it.

    Attributes:
        settled: the same, as the last checkpoint has it: the state a silo measures its own model by.
    """

    def __init__(
        self,
        run_context: RunContext,
        clock: Clock,
        log: MessageLog,
        counters: Counters,
        roster: Peers,
        fault_injector: FaultInjector,
        settled: Mapping[str, int],
    ) -> None:
        self._run_context, self._clock, self._log = run_context, clock, log
        self._counters, self._roster, self._fault_injector = counters, roster, fault_injector
        self._earlier = (counters.sent, counters.received, counters.refused)
        self._earlier_seconds, self._began = counters.seconds.get("total", 0.0), clock.stopwatch()
        self.settled = settled
        self._settled_before: Mapping[str, int] = {}

    def durably_settled(self, silo: str) -> int:
        """Number of the task up to which a silo may forget its states.

        The checkpoint before the last has it settled: if the last one is damaged, the run goes on from there.
        """
        return self._settled_before.get(silo, 0)

    def save(self, after: Rounds, states: Mapping[int, State], due: Mapping[str, float], cause: int) -> None:
        """Write a checkpoint of the machine as it is after a merge.

        Args:
            after: the machine.
            states: the method's, by version.
            due: arrival times of the tasks in flight [s].
            cause: number of the event that made the merge due.

        Raises:
            RunError: the disk refused it again and again.
        """
        self.settled, self._settled_before = after.settled, self.settled
        self.update_counters()
        issued = {silo: self._fault_injector.issued[silo] for silo in after.pending}
        rounds, now, counters = after.to_record(), self._clock.now(), self._counters.to_record()
        run_context = self._run_context
        record = checkpoints.Checkpoint(
            rounds, states, now, due, counters, issued, run_context.data, run_context.trace_file
        )
        for left in reversed(range(_TRIES)):
            try:
                to_disk = partial(self._fault_injector.to_disk, after.version, cause)
                checkpoints.save(self._run_context.folder.checkpoints, record, to_disk)
                return
            except RunError as error:
                self._log.note(NoteKind.CHECKPOINT_REFUSED, version=after.version, error=str(error)[:300], cause=cause)
                if not left:
                    raise
                self._clock.pause(_PAUSE_SECONDS)

    def update_counters(self) -> None:
        """Bring the tally's messages and seconds up to now; a resumed run adds to what it had."""
        self._counters.seconds["total"] = self._earlier_seconds + self._clock.stopwatch() - self._began
        sent, received, refused = self._earlier
        self._counters.sent, self._counters.received = sent + self._roster.sent, received + self._roster.received
        self._counters.refused = refused + self._roster.refused
