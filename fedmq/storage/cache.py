"""The cache of content-addressed folders, each created atomically, and of the digests of files that were read.

Digests of files are remembered in the cache, so that an unchanged file is read only once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Final

import blake3

from fedmq.errors import InputError, RunError
from fedmq.storage.locks import locked
from fedmq.storage.regular_files import open_regular

FORMAT: Final = 1  # part of every cache key, so that a change of format makes new folders
_VARIABLE: Final = "FEDMQ_CACHE"


def cache_folder() -> Path:
    """Folder of prepared data and shared weights: $FEDMQ_CACHE, else $XDG_CACHE_HOME/fedmq, else ~/.cache/fedmq."""
    if configured := os.environ.get(_VARIABLE):
        return Path(configured)
    general = os.environ.get("XDG_CACHE_HOME")
    return (Path(general) if general else Path.home() / ".cache") / "fedmq"


def use_cache(folder: Path | None) -> None:
    """Use another cache folder in this process and those that it starts; None changes nothing."""
    if folder is not None:
        os.environ[_VARIABLE] = str(folder)


def build_once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Create a folder atomically, and only once even if several processes request it; return it as it is if it exists.

    ``fill`` writes the contents into the empty folder that it receives.

    Raises:
        RunError: the cache cannot be written.
    """
    if folder.is_dir():
        return folder
    try:
        with locked(folder.with_name(f"{folder.name}.lock")):
            if not folder.is_dir():
                # No other process holds the lock, so an unfinished folder is left over from a crash.
                unfinished = folder.with_name(f"{folder.name}.unfinished")
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                try:
                    fill(unfinished)
                    unfinished.rename(folder)
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise RunError(f"cache {folder.parent} cannot be written: {error.strerror or error}") from error
    return folder


def key_of(*parts: object) -> str:
    """SHA-256 (hex) over the canonical JSON of ``parts``, the name of a folder in the cache."""
    return hashlib.sha256(json.dumps([FORMAT, *parts], sort_keys=True, separators=(",", ":")).encode()).hexdigest()


_READERS = min(16, os.cpu_count() or 4)
_BLOCK = 1 << 20  # bytes per read
_BATCH = 1024  # files between two reports of progress; their digests are remembered together
_DIGITS = 64  # of a digest
#: What SQLite raises on a damaged file, also of messages that quote what is in it.
_BROKEN = (OSError, sqlite3.Error, UnicodeError)
_WAIT_S = 30.0  # for another process that is writing
_COLUMNS = (
    "path BLOB PRIMARY KEY, device INTEGER, inode INTEGER, size INTEGER, mtime INTEGER, ctime INTEGER, digest TEXT"
)

#: Device, inode, size, and times of change of the content and of the inode [ns].
Identity = tuple[int, int, int, int, int]


def _identity(path: Path) -> Identity:
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):  # reading or even opening a pipe or device may block forever
        raise InputError(str(path), "no regular file", "a readable file")
    return _identity_of(about)


def _identity_of(about: os.stat_result) -> Identity:
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def read_digest(path: Path) -> tuple[Identity, str]:
    """A file's identity before it was read, and its digest.

    Raises:
        InputError: it cannot be read, or it changed meanwhile.
    """
    try:
        before, hashed = _identity(path), blake3.blake3()
        with path.open("rb", buffering=0) as file:
            while block := file.read(_BLOCK):
                hashed.update(block)
        if _identity(path) != before:
            raise InputError(str(path), "a file that changed while it was read", "files that nothing writes to")
    except (OSError, ValueError) as error:
        problem = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError(str(path), problem, "a readable file") from None
    return before, hashed.hexdigest()


class _Memory:
    """Digests of earlier calls, in an SQLite file; without one if it cannot be opened, e.g. in a read-only cache."""

    def __init__(self) -> None:
        path = cache_folder() / "file_digests.sqlite"
        self._file: sqlite3.Connection | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, timeout=_WAIT_S)
            self._file.execute(f"CREATE TABLE IF NOT EXISTS digests ({_COLUMNS})")
        except _BROKEN:
            self.close()

    def find(self, path: bytes, identity: Identity) -> str | None:
        if self._file is None:
            return None
        query = "SELECT device, inode, size, mtime, ctime, digest FROM digests WHERE path = ?"
        try:
            row = self._file.execute(query, (path,)).fetchone()
        except _BROKEN:
            return None
        if row is None or tuple(row[:5]) != _signed(identity):
            return None
        digest = str(row[5])[:_DIGITS]
        return digest if row[5] == _sealed(path, identity, digest) else None

    def keep(self, rows: Sequence[tuple[bytes, Identity, str]]) -> None:
        if self._file is None or not rows:
            return
        values = [(path, *_signed(identity), _sealed(path, identity, digest)) for path, identity, digest in rows]
        try:
            with self._file:
                self._file.executemany("INSERT OR REPLACE INTO digests VALUES (?, ?, ?, ?, ?, ?, ?)", values)
        except _BROKEN:
            self.close()  # the cache only saves time

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


def _sealed(path: bytes, identity: Identity, digest: str) -> str:
    """A file's digest followed by one of it and the file, so that a damaged row is noticed."""
    return digest + blake3.blake3(path + repr((identity, digest)).encode()).hexdigest()


def _signed(identity: Identity) -> tuple[int, ...]:
    """The numbers as SQLite's signed 64-bit integers; inodes of some file systems use all 64 bits."""
    return tuple(number - (1 << 64) if number >= 1 << 63 else number for number in identity)


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes; read again only if the file changed, as for :func:`file_digests`.

    Raises:
        InputError: the file cannot be read.
    """
    with open_regular(path, "a readable file") as file, closing(_Memory()) as memory:
        about, key = os.fstat(file.fileno()), b"sha256 " + os.fsencode(path.absolute())
        if (known := memory.find(key, before := _identity_of(about))) is not None:
            return known
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if _identity_of(os.fstat(file.fileno())) == before:
            memory.keep([(key, before, digest)])
        return digest


def file_digests(paths: Sequence[Path], on_progress: Callable[[int], None] = lambda _done: None) -> list[str]:
    """BLAKE3 (hex) of each file's bytes.

    A file is read again only if its absolute path, inode, size or a time of change differs from when it was read.

    Raises:
        InputError: a file cannot be read, or it changed while it was read.
    """
    digests: list[str] = []
    with closing(_Memory()) as memory, ThreadPoolExecutor(_READERS) as pool:
        for start in range(0, len(paths), _BATCH):
            part = [path.absolute() for path in paths[start : start + _BATCH]]
            known: list[str | None] = []
            for path in part:
                try:
                    known.append(memory.find(os.fsencode(path), _identity(path)))
                except (OSError, ValueError):
                    known.append(None)  # reading it reports the reason
            unknown = [path for path, digest in zip(part, known, strict=True) if digest is None]
            read = list(pool.map(read_digest, unknown))
            memory.keep([(os.fsencode(path), *facts) for path, facts in zip(unknown, read, strict=True)])
            fresh = iter(read)
            digests += [next(fresh)[1] if digest is None else digest for digest in known]
            on_progress(len(digests))
    return digests
