"""Checkpoints: written after every merge, whole or not at all; the last two are kept."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import JsonValue
from safetensors import SafetensorError

from coordinator.checkpoint_records import CheckpointRecord, CountersRecord, RoundsRecord
from fedmq.errors import InputError, RunError
from fedmq.federation.protocol import State
from fedmq.storage.json_files import read_json
from fedmq.storage.run_folder import load_aligned, write_tensors

KEPT = 2
_THETA = "theta"
_PREFIX = "state."
_AGAIN = "a whole checkpoint; delete this one to go on from the one before"


@dataclass(frozen=True)
class Checkpoint:
    """Everything a coordinator needs to go on as if nothing had happened.

    Args:
        rounds: the rounds machine.
        states: the method's state at the present version, and at every older version that a task in flight or an
            evaluation still stands on.
        now: the run's time [s].
        due: arrival time [s] of each task in flight, by silo.
        counters: for the summary.
        issued: number and time of handing out [s] of each task in flight, by silo.
        data: digest of the prepared data that the run is of.
        trace: digest of the file that says when silos are on; empty where there is none.
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
    """Wait until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _existing(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    # Numbers have six digits or more: by their length first.
    return sorted(folder.glob("version-*"), key=lambda each: (len(each.name), each.name)) if folder.is_dir() else []


def save(folder: Path, checkpoint: Checkpoint, to_disk: Callable[[Path], None] = to_disk) -> Path:
    """Write a checkpoint beside the others, then drop all but the last two.

    Args:
        folder: ``checkpoints`` of the run folder.
        checkpoint: what to write.
        to_disk: brings a file or folder to the disk.

    Returns:
        The new checkpoint's folder.

    Raises:
        RunError: the disk refused it; the checkpoints before it are untouched.
    """
    target = folder / f"version-{checkpoint.rounds.version:06d}"
    temporary = folder / f".{target.name}"
    before = _existing(folder)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        digests, known = dict[str, str](), _digests(before[-1]) if before else {}
        for version, state in checkpoint.states.items():
            name = f"state-{version:06d}.safetensors"
            older = before[-1] / name if before else None
            if older is not None and older.exists() and before[-1] != target:
                # The same tensors are on disk already; a second name costs nothing.
                os.link(older, temporary / name)
                # What it was when it was written: the digest of now would vouch for a file that was changed since.
                digests[name] = known.get(name) or _digest(older)
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
            values={str(version): dict(state.values) for version, state in checkpoint.states.items()},
        )
        (temporary / "checkpoint.json").write_text(json.dumps(record.plain()), encoding="utf-8")
        to_disk(temporary / "checkpoint.json")
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
        to_disk(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunError(f"{target}: the checkpoint could not be written: {error}") from error
    for old in _existing(folder)[:-KEPT]:
        shutil.rmtree(old)
    return target


def _write_state(path: Path, state: State) -> None:
    tensors = {_THETA: state.theta, **{_PREFIX + name: tensor for name, tensor in state.tensors.items()}}
    # Clones: safetensors refuses tensors that share memory, as views of one buffer do.
    write_tensors(path, {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()})


def _digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digests(folder: Path) -> dict[str, str]:
    """What a checkpoint says its states' digests are; nothing if it is damaged, or from before there were any."""
    try:
        return read_json(folder / "checkpoint.json", CheckpointRecord, _AGAIN).digests or {}
    except InputError:
        return {}


def load(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint, or None if the run never got that far.

    Raises:
        InputError: the newest checkpoint is damaged.
    """
    existing = _existing(folder)
    if not existing:
        return None
    newest = existing[-1]
    meta = read_json(newest / "checkpoint.json", CheckpointRecord, _AGAIN)
    try:
        states = {
            int(version): _read_state(newest / f"state-{int(version):06d}.safetensors", values, meta.digests)
            for version, values in meta.values.items()
        }
    except (OSError, KeyError, SafetensorError) as error:
        raise InputError(str(newest), f"a damaged state ({error})", _AGAIN) from None
    issued = {silo: (int(sequence), float(at)) for silo, (sequence, at) in meta.handed.items()}
    return Checkpoint(meta.rounds, states, meta.now, meta.due, meta.tally, issued, meta.data, meta.trace)


def _read_state(path: Path, values: Mapping[str, JsonValue], digests: Mapping[str, str] | None) -> State:
    if digests is not None and _digest(path) != digests[path.name]:
        raise OSError(f"{path.name} is not the file that was written")
    tensors = load_aligned(path)
    theta: torch.Tensor = tensors.pop(_THETA)
    return State(theta, {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}, values)
