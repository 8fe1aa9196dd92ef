"""The coordinator's fault injector: it decides every task's outcome and carries out the faults a scenario scripts.

Outcomes are drawn by pure functions (:mod:`fedmq.federation.fault_schedule`). Each fault is carried out on a task once,
however often the task is sent, so a run always ends. Killing a process needs the supervisor that started it; where the
processes were launched manually, the outcome stands and the log notes that nothing was killed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from coordinator.checkpoint import to_disk
from coordinator.events import Failed
from fedmq.clock import Clock
from fedmq.config.faults import Corrupt, Crash, Drop, Duplicate, Freeze, Late, Leave, Reorder, Split, Standing
from fedmq.errors import RemoteWireError
from fedmq.federation.fault_effects import FailureReason, TaskOutcome
from fedmq.federation.fault_schedule import FaultSchedule, Strike
from fedmq.storage.json_files import Stored, read_lines
from fedmq.storage.run_folder import RunFolder, append_line, cut_unfinished
from fedmq.wire.channel import BEAT_SECONDS
from fedmq.wire.codec import decode_header
from fedmq.wire.log_records import NoteKind
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import COORDINATOR, Header, Kind, Message

Frames = tuple[bytes, Sequence[Any]]
_ON_FRAMES = Drop | Split | Duplicate | Reorder | Corrupt
_STANDING = get_args(Standing)


class _Fired(Stored):
    fault: str


@dataclass(frozen=True)
class ProcessCommand:
    """What the coordinator asks of whoever started the processes.

    Args:
        what: ``kill`` and start again; ``freeze`` for ``seconds``; ``stop`` until ``start``; ``die``: kill the
            coordinator itself and start it again from its checkpoint.
        name: of the process.
        seconds: real seconds of a freeze.
    """

    what: Literal["kill", "freeze", "stop", "start", "die"]
    name: str
    seconds: float = 0.0


class FaultInjector:
    """The faults of a run as its coordinator meets them.

    Args:
        script: which faults strike what.
        folder: the run folder; faults that must not strike again after a restart are on record there.
        log: the coordinator's message log.
        clock: the run's clock.
        order: carries out orders; None where nobody can.
        wired: whether replies come as frames; in one process they come as they are.
        issued: number and time of handing out [s] of the tasks in flight, by silo, from a checkpoint.
    """

    def __init__(
        self,
        script: FaultSchedule,
        folder: RunFolder,
        log: MessageLog,
        clock: Clock,
        *,
        order: Callable[[ProcessCommand], None] | None,
        wired: bool,
        issued: Mapping[str, tuple[int, float]],
    ) -> None:
        self.script = script
        self.issued = dict(issued)
        self._log, self._clock, self._order, self._wired = log, clock, order, wired
        self._record = folder.faults
        cut_unfinished(self._record)
        self._fired = {line.fault for line in read_lines(self._record, _Fired, "a fault that fired")}
        self._strikes: dict[str, list[Strike]] = {}
        self._on_frames: dict[tuple[str, int], list[Strike]] = {}
        self._held: dict[str, Frames] = {}
        self._stopped: set[str] = set()
        if script.faults and not clock.virtual:
            log.note(NoteKind.WALL_CLOCK_FAULTS)

    # ------------------------------------------------------------------------------------------------------- tasks
    def outcome(self, silo: str, sequence: int, version: int, work: float, cause: int) -> TaskOutcome:
        """What becomes of a task; the same however often it is asked.

        Args:
            silo: whom it is for.
            sequence: its number.
            version: it stands on.
            work: seconds a silo left in peace needs for it.
            cause: number of the event that it was handed out for.
        """
        known = self.issued.get(silo)
        fresh = known is None or known[0] != sequence
        if known is None or fresh:
            known = self.issued[silo] = (sequence, self._clock.now())
        outcome, strikes = self.script.outcome(silo, sequence, version, known[1], work)
        self._strikes[silo] = strikes
        if fresh:
            for place, fault in strikes:
                if not isinstance(fault, _STANDING) or self._mark_fired(f"{place} {silo}"):
                    self._log_strike(Strike(place, fault), silo, sequence, cause)
        return outcome

    def delay(self, silo: str) -> float:
        """How long a reply of the silo's present task is held back on a wall clock [s]."""
        return sum(fault.seconds for _, fault in self._strikes.get(silo, ()) if isinstance(fault, Late))

    def withhold(self, silo: str, outcome: TaskOutcome) -> None:
        """A task is not sent, because the silo left or cannot be reached."""
        if outcome.fails is FailureReason.AWAY and self._order is not None and silo not in self._stopped:
            self._stopped.add(silo)
            self._order(ProcessCommand("stop", silo))

    def restart(self, silo: str) -> None:
        """A silo that left comes back."""
        if silo in self._stopped and self._order is not None:
            self._stopped.discard(silo)
            self._order(ProcessCommand("start", silo))

    def after_sending(self, silo: str, sequence: int, cause: int) -> None:
        """The silo has its task: kill it, freeze it, or lie in wait for its reply."""
        for place, fault in self._strikes.get(silo, ()):
            if isinstance(fault, Drop) and fault.again is None:
                # The task fails however often it is sent, also after a restart: that is its outcome.
                self._on_frames[silo, sequence] = [Strike(place, fault)]
            elif isinstance(fault, _ON_FRAMES | Crash | Freeze | Leave) and self._mark_fired(
                f"{place} {silo} {sequence}"
            ):
                match fault:
                    case Crash() | Leave():
                        self._command(ProcessCommand("kill", silo), fault.kind, sequence, cause)
                    case Freeze():
                        seconds = fault.beats * BEAT_SECONDS if self._clock.virtual else fault.seconds
                        self._command(ProcessCommand("freeze", silo, seconds), fault.kind, sequence, cause)
                    case _:
                        self._on_frames.setdefault((silo, sequence), []).append(Strike(place, fault))

    def restart_stopped(self) -> None:
        """Whoever left comes back: the rounds are over, and every silo may be asked about its own model."""
        for silo in sorted(self._stopped):
            self.restart(silo)

    def _command(self, order: ProcessCommand, kind: str, sequence: int, cause: int) -> None:
        if self._order is not None:
            self._order(order)
        else:
            self._log.note(NoteKind.FAULT_NOT_CARRIED_OUT, kind=kind, silo=order.name, sequence=sequence, cause=cause)

    def _log_strike(self, strike: Strike, silo: str, sequence: int, cause: int) -> None:
        """Put a strike on record."""
        place, fault = strike
        self._log.note(NoteKind.FAULT, kind=fault.kind, place=place, silo=silo, sequence=sequence, cause=cause)

    def _mark_fired(self, fault: str) -> bool:
        """Whether this has not happened yet; from now on it has, also after a restart."""
        if fault in self._fired:
            return False
        self._fired.add(fault)
        append_line(self._record, _Fired(fault=fault).plain(), durable=True)
        return True

    # ------------------------------------------------------------------------------------------------------ frames
    def incoming(self, address: bytes, frames: Sequence[Any]) -> tuple[list[Frames], list[Failed]]:
        """What the roster gets in place of what arrived, and the tasks whose reply is lost for good."""
        arrived: list[Frames] = [(address, frames)]
        failed: list[Failed] = []
        header = _header_of(frames) if self._on_frames or self._held else None
        if header is None:
            return arrived, failed
        held = self._held.pop(header.sender, None)
        answered = header.reply_to if header.kind is Kind.REPLY else None
        strikes = [] if answered is None else self._on_frames.pop((header.sender, answered), [])
        for _, fault in strikes:
            match fault:
                case Drop(again=None) if answered is not None:
                    arrived = []
                    failed.append(Failed(header.sender, answered, FailureReason.DROPPED))
                case Drop() if self._wired:
                    arrived = []
                case Split() if self._wired:
                    arrived = []
                case Duplicate() if self._wired:
                    arrived = arrived * 2
                case Reorder() if self._wired and arrived:
                    self._held[header.sender], arrived = arrived[0], arrived[1:]
                case Corrupt() if self._wired:
                    arrived = [(address, _damaged(frames)) for address, frames in arrived]
                case _:
                    pass
        return (arrived if held is None else [*arrived, held]), failed

    # ------------------------------------------------------------------------------------------------- coordinator
    def after_event(self, version: int, events: int) -> None:
        """So many events of the run are dealt with; the coordinator may be scripted to die now."""
        for place, fault in self.script.crashes():
            due = version >= fault.after_round if fault.after_round else events >= (fault.after_event or 0)
            if due and self._mark_fired(f"{place} {COORDINATOR}"):
                self._log_strike(Strike(place, fault), COORDINATOR, version, events)
                self._command(ProcessCommand("die", COORDINATOR), fault.kind, version, events)

    def to_disk(self, version: int, cause: int, path: Path) -> None:
        """Bring a file of a version's checkpoint to the disk; a disk scripted to be full refuses.

        Raises:
            OSError: the disk is full.
        """
        for place, fault in self.script.refusals(version):
            for number in range(fault.times):
                if self._mark_fired(f"{place} disk {number}"):
                    self._log_strike(Strike(place, fault), COORDINATOR, version, cause)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        to_disk(path)


def _header_of(frames: Sequence[Any]) -> Header | None:
    """The clear header, which is enough to know whose reply this is; None if there is none to read."""
    if isinstance(frames[0], Message):
        return frames[0].header
    try:
        return decode_header(frames[0])
    except (RemoteWireError, TypeError):
        return None


def _damaged(frames: Sequence[Any]) -> list[memoryview]:
    """The frames with one bit of the sealed body flipped."""
    body = bytearray(frames[1])
    if body:  # anybody may send an empty frame
        body[len(body) // 2] ^= 1
    return [frames[0], memoryview(bytes(body))]
