"""Reading files that others may have created: only regular files within their folder, of bounded size.

Opening a FIFO blocks, a device never ends, and a link can lead to a file of the reader outside the folder.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from fedmq.errors import InputError

#: Maximum length of a line of a message log or of metrics [bytes]. A coordinator lists the keys of all silos in one
#: line.
MAX_LINE = 1 << 22
#: Maximum size of a JSON file [bytes].
MAX_JSON = 1 << 26
_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISDIR, "Is a directory"),
)


def is_file(path: Path) -> bool:
    """Whether a file exists; False for names that the file system does not accept, as they are too long."""
    try:
        return path.is_file()
    except PermissionError:
        return True  # opening it reports the reason
    except OSError:
        return False


def check_regular(path: Path, allowed: str, most: int | None = None) -> None:
    """Refuse a path that is not a regular file, or is larger than ``most`` bytes; ``allowed`` is what it should be.

    Raises:
        InputError: see above, or it does not exist.
    """
    try:
        _check(path, path.stat(), most, allowed)
    except OSError as error:
        raise InputError(str(path), error.strerror or str(error), allowed) from None


def _check(path: Path, about: os.stat_result, most: int | None, allowed: str) -> None:
    if not stat.S_ISREG(about.st_mode):
        found = next((name for is_kind, name in _KINDS if is_kind(about.st_mode)), "not a file")
        raise InputError(str(path), found, f"{allowed}, as a regular file")
    if most is not None and about.st_size > most:
        raise InputError(str(path), f"{about.st_size:,} bytes", f"{allowed}, of at most {most:,} bytes")


def open_regular(path: Path, allowed: str, most: int | None = None, *, links: bool = True) -> BufferedReader:
    """Open a regular file for reading, without blocking on anything else; arguments as of :func:`check_regular`.

    A file that is read line by line may have any size. ``links`` follows a symbolic link.

    Raises:
        InputError: it cannot be opened, is not a regular file, or is too large.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    try:
        file = os.fdopen(os.open(path, flags), "rb")
    except OSError as error:
        raise InputError(str(path), error.strerror or str(error), allowed) from None
    try:
        _check(path, os.fstat(file.fileno()), most, allowed)
    except BaseException:
        file.close()
        raise
    return file


def read_regular(path: Path, allowed: str, most: int = MAX_JSON, *, links: bool = True) -> bytes:
    """Read a regular file of at most ``most`` bytes; arguments and errors as in :func:`open_regular`."""
    with open_regular(path, allowed, most, links=links) as file:
        # Python allocates what it is asked for. Some files of the system say that they are empty.
        return file.read(min(most, os.fstat(file.fileno()).st_size + (1 << 16)))


def bounded_lines(path: Path, file: BinaryIO, allowed: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers, from 1.

    Raises:
        InputError: a line is longer than :data:`MAX_LINE`.
    """
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise InputError(f"{path}: line {number}", f"more than {MAX_LINE:,} bytes", f"{allowed}, in shorter lines")
        yield number, line


def check_run_files(root: Path) -> None:
    """Refuse a run folder in which a file that fedmq reads is not regular, or is a link out of the folder.

    Raises:
        InputError: names the first such file.
    """
    folders = [path for path in (root / "messages", root / "model") if os.path.lexists(path)]
    named = [root / name for name in ("scenario.yaml", "summary.json", "metrics.jsonl", "faults.jsonl", "status.json")]
    paths = [*folders, *(path for path in named if os.path.lexists(path))]
    for folder in folders:
        _inside(folder, root)
        if folder.is_dir():
            paths += sorted(path for path in folder.iterdir() if path.suffix in (".jsonl", ".json", ".safetensors"))
    for path in paths:
        _inside(path, root)
        if path not in folders:
            check_regular(path, "a file of a run folder")


def _inside(path: Path, root: Path) -> None:
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):  # not resolve, which fails on circles
        found = f"a link to {path.readlink()}" if path.is_symlink() else "a file outside of the run folder"
        raise InputError(str(path), found, "a file in the run folder itself")


@dataclass
class AppendedLines:
    """The lines of a file as they are appended."""

    path: Path  # the file, which need not exist yet
    position: int = 0  # number of bytes read so far

    def new(self) -> tuple[list[bytes], bool]:
        """Complete lines appended since the last call, and whether the file was cut and these are all its lines."""
        try:
            with open_regular(self.path, "a file to which lines are appended") as file:
                cut = file.seek(0, 2) < self.position
                if cut:
                    self.position = 0
                file.seek(self.position)
                content = file.read()
        except (OSError, InputError):
            return [], False
        complete, _, _ = content.rpartition(b"\n")
        self.position += len(complete) + bool(complete)
        return complete.split(b"\n") if complete else [], cut
