"""Faults of a scenario on the coordinator's side.

Outcomes are drawn by pure functions (:mod:`fedmq.federation.faults`). Each fault strikes a task once, however
often the task is sent, so that every run ends. Only the supervisor can kill or freeze processes; where processes were
launched manually, the outcome still holds and the log notes that the fault was not carried out.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from coordinator.round_events import Failed, Send
from fedmq.clock import Clock
from fedmq.config.faults import (
    ON_MESSAGES,
    Corrupt,
    Crash,
    Drop,
    Duplicate,
    Freeze,
    Late,
    Leave,
    Persistent,
    Poison,
    Reorder,
    Split,
)
from fedmq.errors import RemoteWireError
from fedmq.federation.faults import FailureReason, FaultSchedule, ScheduledFault, TaskOutcome
from fedmq.storage.json_files import Stored, read_lines
from fedmq.storage.run_folder import RunFolder, append_line, cut_unfinished, to_disk
from fedmq.wire.channel import BEAT_SECONDS
from fedmq.wire.codec import decode_header
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import COORDINATOR, Header, Kind, Message

#: Address, frames, and the header if it is decoded already.
Frames = tuple[bytes, Sequence[Any], Header | None]
_PERSISTENT, _POISON = get_args(Persistent), get_args(Poison)


class _Fired(Stored):
    fault: str


@dataclass(frozen=True)
class ProcessCommand:
    """A command from the coordinator to the supervisor about a process of the run."""

    # ``kill`` and restart; ``freeze`` for ``seconds``; ``stop`` until ``start``; ``die``: kill the coordinator itself
    # and restart it from its checkpoint.
    what: Literal["kill", "freeze", "stop", "start", "die"]
    name: str
    seconds: float = 0.0  # real time of a freeze [s]


class FaultInjector:
    """Injects the faults of a run on the coordinator's side."""

    def __init__(
        self,
        script: FaultSchedule,
        folder: RunFolder,  # the run folder; it records the faults that must not strike again after a restart
        log: MessageLog,
        clock: Clock,
        *,
        order: Callable[[ProcessCommand], None] | None,  # executes a process command; None without a supervisor
        wired: bool,  # whether replies arrive as frames rather than as messages of this process
        # Number and issue time [s] of each pending task, by silo, from a checkpoint.
        issued: Mapping[str, tuple[int, float]],
    ) -> None:
        self.script = script
        self.issued = dict(issued)
        self._log, self._clock, self._order, self._wired = log, clock, order, wired
        self._record = folder.faults
        cut_unfinished(self._record)
        self._fired = {line.fault for line in read_lines(self._record, _Fired, "a fault that fired")}
        self._strikes: dict[str, list[ScheduledFault]] = {}
        self._on_frames: dict[tuple[str, int], list[ScheduledFault]] = {}
        self._causes: dict[tuple[str, int], int | None] = {}
        self._held: dict[str, Frames] = {}
        self._stopped: set[str] = set()
        if script.faults and not clock.virtual:
            log.note(LogEvent.WALL_CLOCK_FAULTS)

    # ------------------------------------------------------------------------------------------------------- tasks
    def outcome(self, silo: str, sequence: int, version: int, work: float, cause: int | None) -> TaskOutcome:
        """The outcome of a task that takes ``work`` [s] without faults; the same at every call."""
        known = self.issued.get(silo)
        fresh = known is None or known[0] != sequence
        if known is None or fresh:
            known = self.issued[silo] = (sequence, self._clock.now())
        outcome, strikes = self.script.outcome(silo, sequence, version, known[1], work)
        self._strikes[silo] = strikes
        if fresh:
            for place, fault in strikes:
                if not isinstance(fault, _PERSISTENT) or self._mark_fired(f"{place} {silo}"):
                    self._log_strike(ScheduledFault(place, fault), silo, sequence, cause)
        return outcome

    def attacked(self, silo: str) -> bool:
        """Whether a scripted attack changes the reply to the silo's pending task."""
        return any(isinstance(fault, _POISON) for _, fault in self._strikes.get(silo, ()))

    def delay(self, silo: str) -> float:
        """Delay of the reply to the silo's pending task on a wall clock [s]."""
        return sum(fault.seconds for _, fault in self._strikes.get(silo, ()) if isinstance(fault, Late))

    def withhold(self, silo: str, outcome: TaskOutcome) -> None:
        """A task is not sent, because the silo left or is unreachable; stop the process of a silo that left."""
        if outcome.fails is FailureReason.AWAY and self._order is not None and silo not in self._stopped:
            self._stopped.add(silo)
            self._order(ProcessCommand("stop", silo))

    def restart(self, silo: str) -> None:
        """Restart a silo's process if it was stopped when the silo left."""
        if silo in self._stopped and self._order is not None:
            self._stopped.discard(silo)
            self._order(ProcessCommand("start", silo))

    def after_sending(self, silo: str, sequence: int, cause: int | None) -> None:
        """A task was sent: kill or freeze the silo, or schedule the faults of its reply."""
        for place, fault in self._strikes.get(silo, ()):
            if isinstance(fault, Drop) and fault.again is None:
                # A permanent loss is the outcome of the task: it holds for every resend, also after a restart.
                self._on_frames[silo, sequence] = [ScheduledFault(place, fault)]
                self._causes[silo, sequence] = cause
            elif isinstance(fault, ON_MESSAGES | Crash | Freeze | Leave) and self._mark_fired(
                f"{place} {silo} {sequence}"
            ):
                match fault:
                    case Crash() | Leave():
                        self._command(ProcessCommand("kill", silo), fault.kind, sequence, cause)
                    case Freeze():
                        seconds = fault.beats * BEAT_SECONDS if self._clock.virtual else fault.seconds
                        self._command(ProcessCommand("freeze", silo, seconds), fault.kind, sequence, cause)
                    case _:
                        self._on_frames.setdefault((silo, sequence), []).append(ScheduledFault(place, fault))

    def step_outcome(self, task: Send, latency: float) -> TaskOutcome:
        """The outcome of a step of a secure sum that begins now, over links with a one-way latency [s]."""
        silo, sequence, now = task.silo, task.sequence, self._clock.now()
        outcome = TaskOutcome(now, 0.0, now + 2 * latency)
        for place, fault in self.script.of_step(silo, sequence, task.base_version, self.issued[silo][1], task.stage):
            if isinstance(fault, Drop):
                outcome = replace(outcome, fails=FailureReason.DROPPED, sent=False)
            if self._mark_fired(f"{place} {silo} {sequence} {task.stage}"):
                self._log_strike(ScheduledFault(place, fault), silo, sequence, task.cause)
                if isinstance(fault, Crash):
                    self._command(ProcessCommand("kill", silo), fault.kind, sequence, task.cause)
        return outcome

    def restart_stopped(self) -> None:
        """Restart all stopped silos, so that every silo can evaluate its personal model."""
        for silo in sorted(self._stopped):
            self.restart(silo)

    def _command(self, order: ProcessCommand, kind: str, sequence: int, cause: int | None) -> None:
        if self._order is not None:
            self._order(order)
        else:
            self._log.note(LogEvent.FAULT_SKIPPED, kind=kind, silo=order.name, sequence=sequence, caused_by=cause)

    def _log_strike(self, strike: ScheduledFault, silo: str, sequence: int, cause: int | None) -> None:
        """Log that a fault strikes."""
        place, fault = strike
        self._log.note(LogEvent.FAULT, kind=fault.kind, place=place, silo=silo, sequence=sequence, caused_by=cause)

    def _mark_fired(self, fault: str) -> bool:
        """Whether a fault strikes for the first time; records it, so that it does not strike again after a restart."""
        if fault in self._fired:
            return False
        self._fired.add(fault)
        append_line(self._record, _Fired(fault=fault).plain(), durable=True)
        return True

    # ------------------------------------------------------------------------------------------------------ frames
    @property
    def strikes_frames(self) -> bool:
        """Whether a fault applies to one of the next messages."""
        return bool(self._on_frames or self._held)

    def incoming(self, address: bytes, frames: Sequence[Any]) -> tuple[list[Frames], list[Failed]]:
        """Apply faults to a received message.

        Returns:
            What the roster receives instead, and the tasks whose reply is lost permanently.
        """
        header = _header_of(frames)
        arrived: list[Frames] = [(address, frames, header)]
        failed: list[Failed] = []
        if header is None:
            return arrived, failed
        held = self._held.pop(header.sender, None)
        answered = header.reply_to if header.kind is Kind.REPLY else None
        strikes = [] if answered is None else self._on_frames.pop((header.sender, answered), [])
        cause = None if answered is None else self._causes.pop((header.sender, answered), None)
        for _, fault in strikes:
            match fault:
                case Drop(again=None) if answered is not None:
                    arrived = []
                    failed.append(Failed(header.sender, answered, FailureReason.DROPPED, cause=cause))
                case Drop() if self._wired:
                    arrived = []
                case Split() if self._wired:
                    arrived = []
                case Duplicate() if self._wired:
                    arrived = arrived * 2
                case Reorder() if self._wired and arrived:
                    self._held[header.sender], arrived = arrived[0], arrived[1:]
                case Corrupt() if self._wired:
                    arrived = [(address, _damaged(frames), header)]
                case _:
                    pass
        return (arrived if held is None else [*arrived, held]), failed

    # ------------------------------------------------------------------------------------------------- coordinator
    def after_event(self, version: int, events: int, cause: int) -> None:
        """Kill the coordinator if the script says so after ``version`` merges or ``events`` events of the timeline."""
        for place, fault in self.script.crashes():
            due = version >= fault.after_round if fault.after_round else events >= (fault.after_event or 0)
            if due and self._mark_fired(f"{place} {COORDINATOR}"):
                self._log_strike(ScheduledFault(place, fault), COORDINATOR, version, cause)
                self._command(ProcessCommand("die", COORDINATOR), fault.kind, version, cause)

    def to_disk(self, version: int, cause: int | None, path: Path) -> None:
        """Flush a file of a version's checkpoint to disk, unless the script simulates a full disk.

        Raises:
            OSError: the disk is full, or simulated to be.
        """
        for place, fault in self.script.full_disks(version):
            for number in range(fault.times):
                if self._mark_fired(f"{place} disk {number}"):
                    self._log_strike(ScheduledFault(place, fault), COORDINATOR, version, cause)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        to_disk(path)


def _header_of(frames: Sequence[Any]) -> Header | None:
    """The header, which is not encrypted and tells whose reply this is; None if it is unreadable."""
    if frames and isinstance(frames[0], Message):
        return frames[0].header
    try:
        return decode_header(frames[0])
    except (RemoteWireError, TypeError, IndexError):
        return None


def _damaged(frames: Sequence[Any]) -> list[memoryview]:
    """The frames with one bit of the sealed body flipped."""
    body = bytearray(frames[1])
    if body:  # a peer may send an empty frame
        body[len(body) // 2] ^= 1
    return [frames[0], memoryview(bytes(body))]
