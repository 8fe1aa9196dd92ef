"""A silo's personal tensors, stored on its disk so that they survive a restart.

The state after task s is stored under s. A task that is sent again starts from the newest state *before* it, so a
repeated task gives the same reply.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open

from fedmq.clock import Clock
from fedmq.errors import DiskError, FedmqError, InputError
from fedmq.profiling import span
from fedmq.storage.regular_files import check_regular
from fedmq.storage.run_folder import bytes_of, load_aligned, remove_unfinished, write_atomically, write_tensors
from fedmq.text import print_line, printable
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import MessageRecord, NoteRecord, read_log
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import Kind

#: Minimum time between two snapshots of a task, and from its start to the first one [s].
SNAPSHOT_SECONDS = 10.0
#: File of the snapshot.
_EPOCHS = "epochs.safetensors"
#: Names of the digest and the owner in a file's metadata.
_DIGEST, _OWNER = "digest", "owner"
#: Maximum size of a file [bytes].
_MOST_BYTES = 1 << 40


def _digest(owner: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """BLAKE3 (hex) of the owner and the tensors' names, types, shapes and values."""
    found = blake3(f"{owner}\n".encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(bytes_of(tensor))
    return found.hexdigest()


def _owner(path: Path) -> str:
    """Silo and name of a file, e.g. ``silo-00/task-000000001``; another silo's state is never used for this one's."""
    return f"{path.parent.name}/{path.stem}"


def _write(path: Path, tensors: Mapping[str, torch.Tensor], owner: str) -> None:
    write_tensors(path, tensors, {_DIGEST: _digest(owner, tensors), _OWNER: owner})


@span("disk")
def _load(path: Path) -> dict[str, torch.Tensor]:
    """Tensors with the owner and the digest that were written with them.

    Raises:
        OSError: the file cannot be read, belongs to another silo or task, or has other content than was written.
    """
    check_regular(path, "a personal state", _MOST_BYTES)
    with safe_open(path, "pt") as file:
        facts = file.metadata() or {}
    if not {_OWNER, _DIGEST} <= facts.keys():
        raise OSError("without the owner and the digest that are written with it")
    tensors, owner = load_aligned(path), facts[_OWNER]
    if owner != _owner(path):
        raise OSError(f"it is {printable(owner[:80])}")
    if facts[_DIGEST] != _digest(owner, tensors):
        raise OSError("other content than was written")
    return tensors


class DiskQueue:
    """States in memory that are written when they are needed on disk: before a reply, or before a checkpoint."""

    def __init__(self) -> None:
        self._stores: dict[StateStore, None] = {}

    def add(self, store: StateStore) -> None:
        """Let :meth:`settle` write the states that a store has in memory only."""
        self._stores[store] = None

    def settle(self) -> None:
        """Write the states, which survive a power failure from then on.

        Raises:
            DiskError: one could not be written, for any reason.
        """
        while self._stores:
            store = next(iter(self._stores))
            del self._stores[store]
            store.write()


class StateStore:
    """A silo's personal tensors by task number, in its own folder; without a queue each is written at once.

    With a queue, a state that is outdated before the queue is settled may never be written.

    The folder is listed only at the start: files that are deleted while the process runs are missed, and never make a
    silo train from an older state.
    """

    def __init__(self, folder: Path, disk_queue: DiskQueue | None = None) -> None:
        self._folder, self._disk_queue = folder, disk_queue
        remove_unfinished(folder)
        self._numbers = self._stored()
        self._unwritten: dict[int, Mapping[str, torch.Tensor]] = {}
        self._committed = 0
        self._newest: tuple[int, Mapping[str, torch.Tensor]] | None = None

    def _path(self, sequence: int) -> Path:
        return self._folder / f"task-{sequence:09d}.safetensors"

    def _stored(self) -> list[int]:
        """Task numbers on disk, in ascending order."""
        numbers = (path.stem.removeprefix("task-") for path in self._folder.glob("task-*.safetensors"))
        return sorted(int(number) for number in numbers if number.isdecimal())

    def newest(self, sequence: int) -> int | None:
        """Number of the newest task up to ``sequence`` whose state is stored; None if there is none."""
        return max((number for number in self._numbers if number <= sequence), default=None)

    def epochs(self, clock: Clock) -> TaskEpochs:
        """Snapshots of the task that starts now."""
        return TaskEpochs(self._folder / _EPOCHS, clock)

    @property
    def empty(self) -> bool:
        """Whether nothing is stored."""
        return not self._numbers

    def before(self, sequence: int) -> Mapping[str, torch.Tensor]:
        """The state from which task ``sequence`` starts; empty for the first.

        Raises:
            InputError: its file is damaged, or was deleted while this process was running.
        """
        number = self.newest(sequence - 1)
        if number is None:
            return {}
        if number in self._unwritten:
            return self._unwritten[number]
        if self._newest is None or self._newest[0] != number:
            path = self._path(number)
            if not path.exists():
                allowed = "the file; start the silo again to continue from the silo's state before it"
                raise InputError(str(path), "a personal state that was deleted while the silo was running", allowed)
            try:
                self._newest = number, _load(path)
            except (OSError, SafetensorError) as error:
                allowed = "an undamaged file; delete it to continue from the silo's state before it"
                raise InputError(str(path), f"a damaged personal state ({error})", allowed) from None
        return self._newest[1]

    def keep(self, sequence: int, state: Mapping[str, torch.Tensor], committed: int) -> None:
        """Store the state after a task; nothing is written if neither this state nor an earlier one has tensors.

        The tensors must not change afterwards. Replies up to the task ``committed`` are merged and checkpointed, so of
        the states up to it only the newest is still needed.

        Raises:
            DiskError: it could not be written, for any reason; with a queue, :meth:`DiskQueue.settle` raises it.
        """
        if state or self._numbers:
            contiguous = {name: tensor.detach().contiguous() for name, tensor in state.items()}
            self._numbers = sorted({*self._numbers, sequence})
            self._newest, self._unwritten[sequence] = (sequence, contiguous), contiguous
            self._committed = committed
            self.write() if self._disk_queue is None else self._disk_queue.add(self)
        if (snapshot := self._folder / _EPOCHS).exists():  # cheaper than a failed unlink, which locks the folder
            snapshot.unlink()  # the task is done

    def drop_unwritten(self, committed: int) -> None:
        """Forget states in memory that no checkpoint needs any more once the task ``committed`` is committed."""
        for number in [number for number in self._unwritten if number < (self.newest(committed) or 0)]:
            del self._unwritten[number]
            self._numbers.remove(number)

    @span("disk")
    def write(self) -> None:
        """Write the states that are in memory only, and then delete those that are no longer needed.

        Raises:
            DiskError: one could not be written, for any reason.
        """
        for number, state in self._unwritten.items():
            kept = self._path(number)
            try:
                write_atomically(kept, partial(_write, tensors=state, owner=_owner(kept)), durable=True)
            except InputError as error:
                raise DiskError(str(error)) from error
        self._unwritten.clear()
        for number in [number for number in self._numbers if number <= self._committed][:-1]:
            self._path(number).unlink(missing_ok=True)
            self._numbers.remove(number)


class TaskEpochs:
    """Snapshots of a task between two epochs; only tasks that take long are interrupted often enough to need them.

    A silo has one file of them; a snapshot of another task is ignored and overwritten.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path, self._clock, self._last = path, clock, clock.stopwatch()
        self.epochs_before = 0  # of the task, done by an earlier process

    def load(self) -> Mapping[str, torch.Tensor]:
        """The snapshot that an earlier process kept; empty if there is none, or it is damaged."""
        if not self._path.exists():
            return {}
        try:
            return _load(self._path)
        except (OSError, SafetensorError, InputError):
            return {}

    def resumed(self, epochs: int) -> None:
        """Note that training continues after this number of epochs."""
        self.epochs_before = epochs

    def save(self, snapshot: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Keep a snapshot, if the last one or the start of the task was long ago."""
        now = self._clock.stopwatch()
        if now - self._last < SNAPSHOT_SECONDS:
            return
        # A task does not depend on its snapshot: a full disk only means that an interrupted task starts over.
        with contextlib.suppress(FedmqError):
            write_atomically(self._path, lambda path: _write(path, snapshot(), _owner(self._path)))
        self._last = self._clock.stopwatch()


def _kept_until(log: MessageLog) -> tuple[bool, int, bool]:
    """From a silo's log: if it had a personal state, the last task after which it stored one, and if it had tasks."""
    kept, last, tasks = False, 0, False
    for _, record in read_log(log.path):
        match record:
            case MessageRecord(action="received") if record.header.kind is Kind.TASK:
                tasks = True
            case NoteRecord(event=LogEvent.STATE_KEPT):
                kept, last = True, int(record.facts.get("task") or 0)
            case NoteRecord(event=LogEvent.STATE_MISSING):
                kept, last = False, 0
            case MessageRecord(action="sent") if kept and record.header.kind is Kind.REPLY:
                last = max(last, record.header.sequence)
    return kept, last, tasks


class StateNotes:
    """Notes in a silo's log that it has a personal state, or has lost it since."""

    def __init__(self, store: StateStore, log: MessageLog) -> None:
        self._store, self._log = store, log
        self._kept, last, tasks = _kept_until(log)
        newest, self._new_folder = store.newest(last), store.empty and not tasks
        # The owner may have deleted it on purpose, but the run can then no longer be reproduced from its scenario.
        if self._kept and store.empty:
            self._kept = False
            log.note(LogEvent.STATE_MISSING)
            print_line(f"{log.process}: {LogEvent.STATE_MISSING.meaning}", error=True)
        elif self._kept and newest != last:
            log.note(LogEvent.STATE_OUTDATED, task=last)
            what = f"the personal state of task {last} is gone; the silo continues from an older one"
            print_line(f"{log.process}: {what}", error=True)

    def after_task(self, number: int, committed: int = 0) -> None:
        """Note the first task after which the silo has a state, and a state that stayed in another folder.

        ``committed`` is the number of the last task whose reply is merged, 0 if none.
        """
        if self._kept:
            return
        if self._store.empty:
            self._new_folder = False  # the method had no state yet
            return
        self._kept = True
        if self._new_folder and committed:
            self._log.note(LogEvent.STATE_MISSING)
            where = "it sent an earlier reply from another folder than this --out"
            what = f"{LogEvent.STATE_MISSING.meaning}; {where}"
            print_line(f"{self._log.process}: {what}", error=True)
        self._log.note(LogEvent.STATE_KEPT, task=number)
