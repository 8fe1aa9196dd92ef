"""The run folder: where everything of a run lies, and how files get there whole."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmq.errors import DiskError, InputError

if TYPE_CHECKING:
    import torch

#: What the system says of a place that cannot be written because another one should have been named. A full or broken
#: disk is nobody's input.
_BAD_PLACE = frozenset(
    {
        errno.EACCES, errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT,
        errno.ENOTDIR, errno.EPERM, errno.EROFS,
    }
)  # fmt: skip


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run folder.

    Args:
        root: ``runs/<name>-<time>``.
    """

    root: Path

    @property
    def scenario(self) -> Path:
        """The scenario as resolved."""
        return self.root / "scenario.yaml"

    @property
    def summary(self) -> Path:
        """The run's result."""
        return self.root / "summary.json"

    @property
    def metrics(self) -> Path:
        """One line per evaluation and per merge."""
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The last two checkpoints, and the silos' personal state."""
        return self.root / "checkpoints"

    @property
    def faults(self) -> Path:
        """One line per scripted fault that must not strike again, whoever restarts."""
        return self.root / "faults.jsonl"

    @property
    def model(self) -> Path:
        """The released model."""
        return self.root / "model"

    @property
    def report(self) -> Path:
        """The report to look at."""
        return self.root / "report.html"

    def messages(self, process: str) -> Path:
        """The message log of a process."""
        return self.root / "messages" / f"{process}.jsonl"

    def silo_state(self, silo: str) -> Path:
        """Folder of a silo's personal state; never read by anyone else."""
        return self.checkpoints / "silos" / silo


def open_run(root: Path) -> RunFolder:
    """An existing run folder.

    Raises:
        InputError: there is none.
    """
    folder = RunFolder(root)
    if not folder.scenario.is_file():
        raise InputError(str(root), "no scenario.yaml in it", "a run folder")
    return folder


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around what makes or writes a file or folder: what the system refuses becomes one line that names it.

    Args:
        path: the file or folder, as the user knows it.

    Raises:
        InputError: the place is not one that can be written.
        DiskError: the system refused for another reason, e.g. a full disk.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _BAD_PLACE:
            raise InputError(str(path), reason, "a folder that can be written") from error
        raise DiskError(f"{path}: could not be written: {reason}") from error


def make_folder(path: Path) -> Path:
    """Make a folder, and those above it, that files can be written into; it may be there already.

    Raises:
        InputError: it cannot be made or written.
        DiskError: the disk is full or broken.
    """
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return path


@contextmanager
def folder_if_used(path: Path) -> Iterator[None]:
    """Make a folder first, to see that it can be; if all fails and it is empty still, one that was made here goes.

    Raises:
        InputError: as :func:`make_folder`.
        DiskError: likewise.
    """
    made = not path.exists()
    make_folder(path)
    try:
        yield
    except BaseException:
        if made:
            with suppress(OSError):
                path.rmdir()
        raise


def write_atomically(path: Path, write: Callable[[Path], None], *, durable: bool = False) -> None:
    """Write a file so that a reader sees the old one or the whole new one, whatever happens in between.

    Args:
        path: the file.
        write: writes the given temporary path.
        durable: also wait until it is on the disk, for what must survive a power cut.

    Raises:
        InputError: the file cannot be written there.
        DiskError: the disk is full or broken.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(temporary)
            if durable:
                with temporary.open("rb") as file:
                    os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file, UTF-8, whole or not at all.

    Raises:
        InputError: the file cannot be written there.
        DiskError: the disk is full or broken.
    """
    write_atomically(path, lambda temporary: _write_text(temporary, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def load_aligned(path: Path) -> dict[str, torch.Tensor]:
    """Load a safetensors file into memory of torch's own allocator.

    Tensors that safetensors maps from the file start wherever they lie in it, and the order in which a matrix product
    sums depends on that: a resumed run would differ from an uninterrupted one in the last bit.
    """
    from safetensors.torch import load_file  # noqa: PLC0415 - brings torch, which the audit of message logs does without

    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file; what the system refuses is the error that it is of any other file.

    Raises:
        OSError: the disk is full or broken, which safetensors says in an error of its own that is none.
    """
    from safetensors import SafetensorError  # noqa: PLC0415 - as above
    from safetensors.torch import save_file  # noqa: PLC0415

    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise OSError(errno.EIO, str(error), str(path)) from error
        raise OSError(code := int(number[1]), os.strerror(code), str(path)) from error


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically.

    Raises:
        InputError: the file cannot be written there.
        DiskError: the disk is full or broken.
    """
    write_atomically(path, lambda temporary: _dump(temporary, value))


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def append_line(path: Path, record: Mapping[str, Any], *, durable: bool = False) -> None:
    """Append one JSON line, whole or not at all.

    Args:
        path: the file.
        record: the line.
        durable: also wait until it is on the disk, for what must survive a power cut.

    Raises:
        InputError: the file cannot be written there.
        DiskError: the disk is full or broken.
    """
    rest = memoryview(json.dumps(record).encode() + b"\n")
    with writing(path), path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            while rest:  # a disk that is about to be full takes a part of it
                rest = rest[file.write(rest) :]
            if durable:
                os.fsync(file.fileno())
        except BaseException:
            file.truncate(size)
            raise


def cut_unfinished(path: Path) -> None:
    """Cut off a last line that a crash left unfinished, so that the next one does not continue it.

    Raises:
        InputError: the file cannot be written.
        DiskError: the disk is full or broken.
    """
    with writing(path):
        if path.exists() and (content := path.read_bytes()) and not content.endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)
