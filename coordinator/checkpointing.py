"""Checkpoints of a running coordinator: their content, and which personal states silos may then delete."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from coordinator import checkpoint_files as checkpoints
from coordinator.counters import Counters
from coordinator.fault_injection import FaultInjector
from coordinator.peers import Peers
from coordinator.rounds import Rounds
from coordinator.run_context import RunContext
from fedmq.clock import Clock
from fedmq.errors import RunError
from fedmq.federation.protocol import State
from fedmq.runs.status import ERROR_CHARACTERS
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import SignedAt
from fedmq.wire.message_log import MessageLog

#: Attempts to write a checkpoint, because a disk may be full only briefly; after the last, the run ends and can be
#: resumed.
_TRIES = 3
#: Real time between attempts [s].
_PAUSE_SECONDS = 0.2


class Checkpointing:
    """Writes the run's checkpoints.

    Args:
        run_context: fixed facts of the run.
        clock: the run's clock.
        log: the coordinator's message log.
        counters: the run's counters, including those of earlier processes.
        roster: counts the messages of this process.
        fault_injector: knows the issue times of tasks, and simulates a full disk.
        settled: number of each silo's last settled task in the checkpoint that the run resumes from.

    Attributes:
        settled: number of each silo's last settled task in the last checkpoint; a silo's personal model is evaluated
            in the state after that task.
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
        """Number of the silo's last task that is settled in the last two checkpoints; it may delete older states.

        If the last checkpoint is damaged, the run resumes from the one before.
        """
        return self._settled_before.get(silo, 0)

    def save(self, after: Rounds, states: Mapping[int, State], due: Mapping[str, float], cause: int | None) -> None:
        """Write a checkpoint after a merge.

        Args:
            after: the rounds machine after the merge.
            states: the method's states by version.
            due: arrival time [s] of each pending task's outcome, by silo.
            cause: number of the log record of the event that caused the merge.

        Raises:
            RunError: the checkpoint could not be written in several attempts.
        """
        self.settled, self._settled_before = after.settled, self.settled
        self.update_counters()
        self._log.sign(SignedAt.MERGE, version=after.version)
        issued = {silo: self._fault_injector.issued[silo] for silo in after.pending}
        rounds, now, counters = after.to_record(), self._clock.now(), self._counters.to_record()
        run_context = self._run_context
        record = checkpoints.Checkpoint(
            rounds, states, now, due, counters, issued, run_context.data, run_context.trace_file
        )
        for attempts_left in reversed(range(_TRIES)):
            try:
                to_disk = partial(self._fault_injector.to_disk, after.version, cause)
                checkpoints.save(self._run_context.folder.checkpoints, record, to_disk)
                return
            except RunError as error:
                text = str(error)[:ERROR_CHARACTERS]
                self._log.note(LogEvent.CHECKPOINT_REFUSED, version=after.version, error=text, caused_by=cause)
                if not attempts_left:
                    raise
                self._clock.pause(_PAUSE_SECONDS)

    def update_counters(self) -> None:
        """Update the counters of messages and of total seconds; a resumed run adds to those in its checkpoint."""
        self._counters.seconds["total"] = self._earlier_seconds + self._clock.stopwatch() - self._began
        sent, received, refused = self._earlier
        self._counters.sent, self._counters.received = sent + self._roster.sent, received + self._roster.received
        self._counters.refused = refused + self._roster.refused
