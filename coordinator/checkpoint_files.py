"""Checkpoints: written atomically after every merge; the last two are kept."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import JsonValue
from safetensors import SafetensorError

from coordinator.checkpoint_records import CheckpointRecord, CountersRecord, RoundsRecord
from fedmq.errors import InputError, RunError
from fedmq.federation.protocol import State
from fedmq.storage.json_files import read_json
from fedmq.storage.regular_files import check_regular
from fedmq.storage.run_folder import load_aligned, write_tensors

KEPT = 2
#: Maximum size of a state [bytes].
_MOST_BYTES = 1 << 40
_THETA = "theta"
_PREFIX = "state."
_UNKNOWN = "0" * 64  # in place of a digest that has not been computed
_ALLOWED = "a complete checkpoint; delete this one to resume from the previous one"


@dataclass(frozen=True)
class Checkpoint:
    """Everything a coordinator needs to resume a run with the same result.

    Args:
        rounds: state of the rounds machine.
        states: the method's state by version: the current one, and older ones that pending tasks or evaluations are
            based on.
        now: the run's time [s].
        due: arrival time [s] of each pending task's outcome, by silo; infinite on a wall clock.
        counters: counters for the summary.
        issued: number and issue time [s] of each pending task, by silo.
        data: digest of the prepared data.
        trace: digest of the availability trace's file; empty if there is none.
    """

    rounds: RoundsRecord
    states: Mapping[int, State]
    now: float
    due: Mapping[str, float]
    counters: CountersRecord
    issued: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    data: str = ""
    trace: str = ""


def to_disk(path: Path) -> None:
    """Flush a file or a folder to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _existing(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    # Version numbers have six digits or more: sort by length first.
    return sorted(folder.glob("version-*"), key=lambda each: (len(each.name), each.name)) if folder.is_dir() else []


def save(folder: Path, checkpoint: Checkpoint, to_disk: Callable[[Path], None] = to_disk) -> Path:
    """Write a checkpoint, then delete all except the last two.

    Args:
        folder: ``checkpoints`` of the run folder.
        checkpoint: the checkpoint.
        to_disk: flushes a file or folder to disk.

    Returns:
        The new checkpoint's folder.

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
                to_disk(temporary / name)
                digests[name] = _digest(temporary / name)
        record = CheckpointRecord(
            rounds=checkpoint.rounds,
            now=checkpoint.now,
            due=dict(checkpoint.due),
            tally=checkpoint.counters,
            handed={silo: list(task) for silo, task in checkpoint.issued.items()},
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
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = error.strerror or error
        raise RunError(f"{target}: the checkpoint could not be written: {reason}") from error
    for old in _existing(folder)[:-KEPT]:
        shutil.rmtree(old)
    return target


def _write_state(path: Path, state: State) -> None:
    tensors = {_THETA: state.theta, **{_PREFIX + name: tensor for name, tensor in state.tensors.items()}}
    # safetensors refuses tensors that share memory, as views of one buffer do.
    write_tensors(path, {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()})


def _digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    needed = {meta.rounds.version, *(base for _, base, _ in meta.rounds.flights.values())}
    if missing := sorted(needed - set(map(int, meta.values))):
        raise InputError(str(newest / "checkpoint.json"), f"no state of version {missing[0]}", _ALLOWED)
    try:
        states = {
            int(version): _read_state(newest / f"state-{int(version):06d}.safetensors", values, meta.digests)
            for version, values in meta.values.items()
        }
    except (OSError, KeyError, SafetensorError) as error:
        raise InputError(str(newest), f"a damaged state ({error})", _ALLOWED) from None
    issued = {silo: (int(sequence), float(at)) for silo, (sequence, at) in meta.handed.items()}
    return Checkpoint(meta.rounds, states, meta.now, meta.due, meta.tally, issued, meta.data, meta.trace)


def check_fits(folder: Path, saved: Checkpoint, rounds: int, silos: Collection[str]) -> None:
    """Check that a checkpoint is of a run with these silos and rounds.

    Args:
        folder: ``checkpoints`` of the run folder.
        saved: the checkpoint.
        rounds: the run's number of rounds.
        silos: names of its silos.

    Raises:
        InputError: it names another silo, or has more rounds.
    """
    place, record = str(folder / _name(saved.rounds.version)), saved.rounds
    if record.version > rounds:
        raise InputError(place, f"version {record.version}", f"{_ALLOWED}; the run has {rounds} rounds")
    named = {*record.gone, *record.flights, *record.sequences, *record.losses, *saved.due, *saved.issued}
    if strange := sorted(named - set(silos)):
        raise InputError(place, strange[0], f"{_ALLOWED}; the run has no such silo")
    if record.flights.keys() != saved.issued.keys():
        raise InputError(place, "tasks without the time when they were sent", _ALLOWED)


def _read_state(path: Path, values: Mapping[str, JsonValue], digests: Mapping[str, str]) -> State:
    check_regular(path, _MOST_BYTES, _ALLOWED)
    if _digest(path) != digests[path.name]:
        raise OSError(f"{path.name} differs from its recorded digest")
    tensors = load_aligned(path)
    theta: torch.Tensor = tensors.pop(_THETA)
    return State(theta, {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}, values)
