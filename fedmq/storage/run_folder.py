"""The run folder: its paths, and atomic writing of its files."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmq.errors import DiskError, InputError
from fedmq.storage.regular_files import check_run_files, open_regular

if TYPE_CHECKING:
    import torch

#: Maximum size of the list of tensors of a safetensors file, which is parsed as a whole [bytes]. 8192 tensors
#: take about 2 MB.
_MAX_TENSOR_LIST = 1 << 23
#: Errors of a path that the user should replace by another one, unlike those of a full or broken disk.
_BAD_PLACE = frozenset(
    {
        errno.EACCES, errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT,
        errno.ENOTDIR, errno.EPERM, errno.EROFS,
    }
)  # fmt: skip

#: Name of a file that a process is writing, by its number.
_TEMPORARY = re.compile(r"\..+\.(?:html|json|jsonl|md|safetensors|yaml)\.([1-9]\d*)")


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run folder."""

    root: Path  # ``runs/<name>-<time>``

    @property
    def scenario(self) -> Path:
        """The resolved scenario."""
        return self.root / "scenario.yaml"

    @property
    def summary(self) -> Path:
        """The run's result."""
        return self.root / "summary.json"

    @property
    def agreement(self) -> Path:
        """What the processes stated about their data, and what the silos agreed on."""
        return self.root / "agreement.json"

    @property
    def status(self) -> Path:
        """The run's status, which its coordinator writes about every second."""
        return self.root / "status.json"

    @property
    def metrics(self) -> Path:
        """One line per evaluation and per merge."""
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The last two checkpoints, and the silos' personal states."""
        return self.root / "checkpoints"

    @property
    def captured(self) -> Path:
        """The payloads that the coordinator keeps with ``privacy.capture``, one file per merge."""
        return self.root / "captured"

    @property
    def faults(self) -> Path:
        """One line per scripted fault that must not occur again after a restart."""
        return self.root / "faults.jsonl"

    @property
    def model(self) -> Path:
        """The released model."""
        return self.root / "model"

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.root / "report.html"

    @property
    def profile(self) -> Path:
        """Where the run's time went, if it was profiled."""
        return self.root / "profile"

    @property
    def speedscope(self) -> Path:
        """The profile for speedscope."""
        return self.profile / "profile.speedscope.json"

    def messages(self, process: str) -> Path:
        """The message log of a process."""
        return self.root / "messages" / f"{process}.jsonl"

    def errors(self, process: str) -> Path:
        """The tracebacks of a process."""
        return self.root / "errors" / f"{process}.log"

    def silo_state(self, silo: str) -> Path:
        """Folder of a silo's personal state, which no other process reads."""
        return self.checkpoints / "silos" / silo


def require_folder(root: Path) -> None:
    """Refuse a run folder that does not exist, before anything large is loaded."""
    if not root.exists():
        raise InputError(str(root), "no such folder", "a run folder")


def open_run(root: Path) -> RunFolder:
    """Open an existing run folder.

    Raises:
        InputError: ``root`` is not a run folder.
    """
    require_folder(root)
    folder = RunFolder(root)
    if not folder.scenario.is_file():
        logs = sorted(path.stem for at in ("", "*/") for path in root.glob(f"{at}messages/*.jsonl"))
        if logs and "coordinator" not in logs:
            problem = f"the folder of {logs[0]}, which has only its own log and state"
            raise InputError(str(root), problem, "the coordinator's run folder (--out of fedmq coordinator)")
        raise InputError(str(root), "no scenario.yaml in it", "a run folder")
    check_run_files(root)
    return folder


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError within the block, which creates or writes a file or folder, into an error that names it.

    Raises:
        InputError: the path cannot be written.
        DiskError: another error, e.g. a full disk.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _BAD_PLACE:
            raise InputError(str(path), reason, "a folder that can be written") from error
        raise DiskError(f"{path}: could not be written: {reason}") from error


def make_folder(path: Path) -> Path:
    """Create a folder and its parents unless it exists, and check that it is writable.

    Raises:
        InputError: it cannot be created or written.
        DiskError: the disk is full or broken.
    """
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return path


@contextmanager
def provisional_folder(path: Path) -> Iterator[None]:
    """Create a folder before the block runs; remove it again if the block fails, unless it existed or has contents.

    Raises:
        InputError: as :func:`make_folder`.
        DiskError: likewise.
    """
    created = not path.exists()
    make_folder(path)
    try:
        yield
    except BaseException:
        if created:
            with suppress(OSError):
                path.rmdir()
        raise


def write_atomically(path: Path, write: Callable[[Path], None], *, durable: bool = False) -> None:
    """Write a file atomically: readers see either the old content or the complete new content.

    ``write`` writes the content to the temporary path that it receives. ``durable`` also waits until the content is on
    disk, for files that must survive a power failure. They are rarely read again, so the system need not cache them: a
    cache that grows with every state of 1,000 silos takes a tenth of a run's time.

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
                to_disk(temporary, cached=False)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def remove_unfinished(*folders: Path) -> None:
    """Remove what processes that were killed had begun to write with :func:`write_atomically`.

    No process of another computer writes in these folders; a file of a process that runs here is left.
    """
    for folder in folders:
        for path in folder.glob(".*.*"):
            name = _TEMPORARY.fullmatch(path.name)
            if name is not None and not _runs(int(name[1])):
                with suppress(OSError):
                    path.unlink()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def write_text(path: Path, text: str) -> None:
    """Write a text file (UTF-8) atomically; errors as of :func:`write_atomically`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically; errors as of :func:`write_atomically`."""

    def write(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_atomically(path, write)


def load_aligned(path: Path) -> dict[str, torch.Tensor]:
    """Load a safetensors file into memory from torch's allocator.

    Memory-mapped tensors have the alignment that they have in the file, and the summation order of a matrix product
    depends on the alignment: a resumed run would differ from an uninterrupted one in the last bit.

    Raises:
        OSError: the file cannot be read, or its list of tensors is longer than that of any model.
    """
    from safetensors.torch import load_file  # noqa: PLC0415 - imports torch, which the audit of message logs avoids

    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > _MAX_TENSOR_LIST:
        raise OSError(f"a list of tensors of {size} bytes, allowed: at most {_MAX_TENSOR_LIST}")
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The values of a tensor as bytes [n], without a copy if it is contiguous and on the CPU."""
    import torch  # noqa: PLC0415 - as above

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel() < 2:  # torch calls it contiguous whatever its stride, and then views it as no other type
        flat = torch.empty(flat.numel(), dtype=flat.dtype).copy_(flat)
    values: memoryview = flat.view(torch.uint8).numpy().data
    return values


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None, mode: int = 0o600
) -> None:
    """Write a safetensors file of tensors and texts by name.

    ``mode`` are the permissions of a new file, before the umask; by default only its owner can read it.

    Raises:
        OSError: it cannot be written; safetensors reports this as an error that is not an OSError.
    """
    from safetensors import SafetensorError  # noqa: PLC0415 - as above
    from safetensors.torch import save_file  # noqa: PLC0415 - as above

    # The library refuses tensors that share memory or that are not contiguous.
    plain: dict[str, torch.Tensor] = {}
    memory: set[int] = set()
    for name, tensor in tensors.items():
        plain[name] = tensor.detach().cpu().contiguous()
        if plain[name].untyped_storage().data_ptr() in memory:
            plain[name] = plain[name].clone()
        memory.add(plain[name].untyped_storage().data_ptr())
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, mode))
    try:
        save_file(plain, path, None if metadata is None else dict(metadata))
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise OSError(errno.EIO, str(error), str(path)) from error
        raise OSError(code := int(number[1]), os.strerror(code), str(path)) from error


def write_whole(file: RawIOBase, content: bytes | memoryview) -> None:
    """Write to an unbuffered file, in several parts if need be.

    Raises:
        OSError: a part could not be written. A nearly full disk accepts a part and reports an error only at the next
            write.
    """
    unwritten = memoryview(content)
    while unwritten:
        unwritten = unwritten[file.write(unwritten) or 0 :]


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
    """Append a JSON line; a failed write leaves no part of it.

    ``durable`` also waits until the line is on disk, for files that must survive a power failure.

    Raises:
        InputError: the file cannot be written there, or is no regular file.
        DiskError: the disk is full or broken.
    """
    line = json.dumps(record).encode() + b"\n"
    if path.exists() and not path.is_file():  # opening a pipe waits for its reader
        raise InputError(str(path), "no regular file", "a regular file, or none")
    with writing(path), path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            write_whole(file, line)
            if durable:
                os.fsync(file.fileno())
        except BaseException:
            file.truncate(size)
            raise


def to_disk(path: Path, *, cached: bool = True) -> None:
    """Flush a file or a folder to disk (fsync); if not ``cached``, the system need not keep its content in memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if not cached and hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def cut_unfinished(path: Path) -> None:
    """Cut off a last line that a crash left incomplete, so that the next line is not appended to it.

    Raises:
        InputError: the file cannot be read or written, or is no regular file.
        DiskError: the disk is full or broken.
    """
    if not path.exists():
        return
    with open_regular(path, "a file of a run folder") as file:
        content = file.read()
    if content and not content.endswith(b"\n"):
        with writing(path):
            os.truncate(path, content.rfind(b"\n") + 1)
