"""Checkpoints: written atomically after every merge; the last two are kept.

``checkpoint.json`` is next to the tensors, which are in safetensors files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, JsonValue
from safetensors import SafetensorError

from coordinator.counters import Counters
from coordinator.faults import FaultInjector
from coordinator.peers import Peers
from coordinator.round_events import RoundsRecord
from coordinator.rounds import Rounds
from coordinator.run_context import RunContext
from fedmq.clock import Clock
from fedmq.errors import InputError, RunError
from fedmq.federation.protocol import State
from fedmq.profiling import span
from fedmq.runs.status import ERROR_CHARACTERS
from fedmq.storage.cache import read_digest
from fedmq.storage.json_files import Amount, Count, Digest, Stored, read_json
from fedmq.storage.regular_files import check_regular
from fedmq.storage.run_folder import load_aligned, to_disk, write_tensors, writing
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import SignedAt
from fedmq.wire.message_log import MessageLog


class CheckpointRecord(Stored):
    """``checkpoint.json``."""

    rounds: RoundsRecord
    now: Amount  # the run's time [s]
    due: dict[str, Annotated[float, Field(ge=0)]]  # arrival time [s] of each pending task's outcome, by silo
    counters: Counters
    # Number and issue time [s] of each pending task, by silo.
    issued: dict[str, Annotated[list[Count | Amount], Field(min_length=2, max_length=2)]]
    data: str  # digest of the prepared data
    trace: str  # digest of the availability trace's file; empty if there is none
    digests: dict[str, Digest]  # BLAKE3 (hex) of the state files, by name
    # Each state's values that are not tensors, by version.
    values: dict[Annotated[str, Field(pattern=r"^\d+$")], dict[str, JsonValue]]
    digest: Digest  # SHA-256 (hex) of the other keys

    @property
    def own_digest(self) -> str:
        """SHA-256 (hex) of all keys but ``digest``, as canonical JSON."""
        plain = {key: value for key, value in self.plain().items() if key != "digest"}
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


KEPT = 2
#: Maximum size of a state [bytes].
_MOST_BYTES = 1 << 40
_THETA = "theta"
_PREFIX = "state."
_UNKNOWN = "0" * 64  # in place of a digest that has not been computed
_ALLOWED = "a complete checkpoint; delete this one to resume from the previous one, or from the start without one"


@dataclass(frozen=True)
class Checkpoint:
    """Everything a coordinator needs to resume a run with the same result."""

    rounds: RoundsRecord
    # The method's state by version: the current one, and older ones that pending tasks or evaluations are based on.
    states: Mapping[int, State]
    now: float  # the run's time [s]
    due: Mapping[str, float]  # arrival time [s] of each pending task's outcome, by silo; infinite on a wall clock
    counters: Counters
    # Number and issue time [s] of each pending task, by silo.
    issued: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    data: str = ""  # digest of the prepared data
    trace: str = ""  # digest of the availability trace's file; empty if there is none


def _existing(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    # Version numbers have six digits or more: sort by length first.
    return sorted(folder.glob("version-*"), key=lambda each: (len(each.name), each.name)) if folder.is_dir() else []


def save(folder: Path, checkpoint: Checkpoint, to_disk: Callable[[Path], None] = to_disk) -> Path:
    """Write a checkpoint, then delete all except the last two; returns its folder.

    Raises:
        RunError: the checkpoint could not be written; earlier checkpoints are untouched.
    """
    target = folder / _name(checkpoint.rounds.version)
    temporary = folder / f".{target.name}"
    before = _existing(folder)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        digests, known = dict[str, str](), _digests(before[-1]) if before else {}
        for version, state in checkpoint.states.items():
            name = f"state-{version:06d}.safetensors"
            older = before[-1] / name if before else None
            if older is not None and older.exists() and name in known and before[-1] != target:
                # The same tensors are on disk already; a hard link needs no space.
                os.link(older, temporary / name)
                # The digest taken at writing: a digest taken now would accept a file that was changed in between.
                digests[name] = known[name]
            else:
                _write_state(temporary / name, state)
                with ThreadPoolExecutor(1) as thread:  # the disk needs longer than the digest
                    digest = thread.submit(read_digest, temporary / name)
                    to_disk(temporary / name)
                digests[name] = digest.result()[1]
        record = CheckpointRecord(
            rounds=checkpoint.rounds,
            now=checkpoint.now,
            due=dict(checkpoint.due),
            counters=checkpoint.counters,
            issued={silo: list(task) for silo, task in checkpoint.issued.items()},
            data=checkpoint.data,
            trace=checkpoint.trace,
            digests=digests,
            digest=_UNKNOWN,
            values={str(version): dict(state.values) for version, state in checkpoint.states.items()},
        )
        record = record.model_copy(update={"digest": record.own_digest})
        (temporary / "checkpoint.json").write_text(json.dumps(record.plain()), encoding="utf-8")
        to_disk(temporary / "checkpoint.json")
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
        to_disk(folder)
    except (OSError, InputError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"{target}: the checkpoint could not be written: {reason}") from error
    for old in _existing(folder)[:-KEPT]:
        shutil.rmtree(old)
    return target


def _write_state(path: Path, state: State) -> None:
    tensors = {_THETA: state.theta, **{_PREFIX + name: tensor for name, tensor in state.tensors.items()}}
    write_tensors(path, tensors)


def _digests(folder: Path) -> dict[str, str]:
    """The recorded digests of a checkpoint's states; empty if it is damaged."""
    try:
        return _record(folder).digests
    except InputError:
        return {}


def _record(folder: Path) -> CheckpointRecord:
    """The record of a checkpoint.

    Raises:
        InputError: it is damaged, has other content than was written, or is of another version than its folder.
    """
    path = folder / "checkpoint.json"
    record = read_json(path, CheckpointRecord, _ALLOWED)
    if record.digest != record.own_digest:
        raise InputError(str(path), "other content than was written", _ALLOWED)
    if folder.name != _name(record.rounds.version):
        raise InputError(str(path), f"version {record.rounds.version}", _ALLOWED)
    return record


def _name(version: int) -> str:
    """Name of a checkpoint's folder."""
    return f"version-{version:06d}"


def load(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint, or None if there is none.

    Raises:
        InputError: the newest checkpoint is damaged.
    """
    existing = _existing(folder)
    if not existing:
        return None
    newest = existing[-1]
    meta = _record(newest)
    needed = {meta.rounds.version, *(base for _, base, _ in meta.rounds.pending.values())}
    if missing := sorted(needed - set(map(int, meta.values))):
        raise InputError(str(newest / "checkpoint.json"), f"no state of version {missing[0]}", _ALLOWED)
    try:
        states = {
            int(version): _read_state(newest / f"state-{int(version):06d}.safetensors", values, meta.digests)
            for version, values in meta.values.items()
        }
    except (OSError, KeyError, SafetensorError) as error:
        raise InputError(str(newest), f"a damaged state ({error})", _ALLOWED) from None
    issued = {silo: (int(sequence), float(at)) for silo, (sequence, at) in meta.issued.items()}
    return Checkpoint(meta.rounds, states, meta.now, meta.due, meta.counters, issued, meta.data, meta.trace)


def check_fits(folder: Path, saved: Checkpoint, rounds: int, silos: Collection[str]) -> None:
    """Check that a checkpoint is of a run with these silos and rounds.

    Raises:
        InputError: it names another silo, or has more rounds.
    """
    place, record = str(folder / _name(saved.rounds.version)), saved.rounds
    if record.version > rounds:
        raise InputError(place, f"version {record.version}", f"{_ALLOWED}; the run has {rounds} rounds")
    named = {*record.gone, *record.pending, *record.sequences, *record.losses, *saved.due, *saved.issued}
    if strange := sorted(named - set(silos)):
        raise InputError(place, strange[0], f"{_ALLOWED}; the run has no such silo")
    if record.pending.keys() != saved.issued.keys():
        raise InputError(place, "tasks without the time when they were sent", _ALLOWED)


def _read_state(path: Path, values: Mapping[str, JsonValue], digests: Mapping[str, str]) -> State:
    check_regular(path, _ALLOWED, _MOST_BYTES)
    if read_digest(path)[1] != digests[path.name]:
        raise OSError(f"{path.name} differs from its recorded digest")
    tensors = load_aligned(path)
    theta: torch.Tensor = tensors.pop(_THETA)
    return State(theta, {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}, values)


#: Attempts to write a checkpoint, because a disk may be full only briefly; after the last, the run ends and can be
#: resumed.
_TRIES = 3
#: Real time between attempts [s].
_PAUSE_SECONDS = 0.2


class Checkpointing:
    """Writes the run's checkpoints: one after each merge, or at most one in ``least_seconds``."""

    def __init__(
        self,
        run_context: RunContext,
        clock: Clock,
        log: MessageLog,
        counters: Counters,  # the run's counters, including those of earlier processes
        roster: Peers,  # counts the messages of this process
        fault_injector: FaultInjector,  # knows the issue times of tasks, and simulates a full disk
        # Number of each silo's last committed task in the last checkpoint; a silo's personal model is evaluated in the
        # state after that task.
        committed: Mapping[str, int],
        least_seconds: float = 0.0,  # minimum time from one checkpoint to the next [s]
    ) -> None:
        self._run_context, self._clock, self._log = run_context, clock, log
        self._counters, self._roster, self._fault_injector = counters, roster, fault_injector
        self._earlier = (counters.sent, counters.received, counters.refused)
        self._earlier_seconds, self._began = counters.seconds.get("total", 0.0), clock.stopwatch()
        self.committed = committed  # at the last merge
        # The same in the last checkpoint, and in the one before.
        self._on_disk: tuple[Mapping[str, int], Mapping[str, int]] = (committed, {})
        self._least_seconds, self._written_at = least_seconds, clock.stopwatch()
        self._unwritten: tuple[Checkpoint, int | None] | None = None

    def durably_committed(self, silo: str) -> int:
        """Number of the silo's last task that is committed in the last two checkpoints; it may delete older states.

        If the last checkpoint is damaged, the run resumes from the one before. It is 0 as long as no reply of the silo
        was merged: tasks that failed left no state that the silo could miss.
        """
        return self._on_disk[1].get(silo, 0) if self._counters.participations[silo] else 0

    @span("disk")
    def save(self, after: Rounds, states: Mapping[int, State], due: Mapping[str, float], cause: int | None) -> None:
        """Save a merge, which the event of log record ``cause`` led to: at once, or with a later merge.

        Raises:
            RunError: the checkpoint could not be written in several attempts.
        """
        self.committed = after.committed
        self._roster.note_unlogged()  # the counters include them, and this process may be killed before it notes them
        self.update_counters()
        issued = {silo: self._fault_injector.issued[silo] for silo in after.pending}
        rounds, now, counters = after.to_record(), self._clock.now(), self._counters.copied()
        run_context = self._run_context
        digests = run_context.data, run_context.trace_file
        self._unwritten = Checkpoint(rounds, dict(states), now, dict(due), counters, issued, *digests), cause
        self._roster.committed(after.committed)
        if self._clock.stopwatch() - self._written_at >= self._least_seconds:
            self.write()

    @span("disk")
    def write(self) -> None:
        """Write the checkpoint of the last merge, if it is not on disk; errors as of :meth:`save`."""
        if self._unwritten is None:
            return
        (record, cause), self._unwritten = self._unwritten, None
        version = record.rounds.version
        self._roster.settle()
        with writing(self._run_context.folder.metrics):  # its lines of the merges that the checkpoint includes
            to_disk(self._run_context.folder.metrics)
        self._log.sign(SignedAt.MERGE, version=version)
        self._on_disk = self.committed, self._on_disk[0]
        for attempts_left in reversed(range(_TRIES)):
            try:
                flush = partial(self._fault_injector.to_disk, version, cause)
                save(self._run_context.folder.checkpoints, record, flush)
                self._written_at = self._clock.stopwatch()
                return
            except RunError as error:
                text = str(error)[:ERROR_CHARACTERS]
                self._log.note(LogEvent.CHECKPOINT_REFUSED, version=version, error=text, caused_by=cause)
                if not attempts_left:
                    raise
                self._clock.pause(_PAUSE_SECONDS)

    def update_counters(self) -> None:
        """Update the counters of messages and of total seconds; a resumed run adds to those in its checkpoint."""
        self._counters.seconds["total"] = self._earlier_seconds + self._clock.stopwatch() - self._began
        sent, received, refused = self._earlier
        self._counters.sent, self._counters.received = sent + self._roster.sent, received + self._roster.received
        self._counters.refused = refused + self._roster.refused
