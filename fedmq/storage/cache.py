"""The cache of content-addressed folders, each of which is created atomically."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fedmq.errors import InputError, RunError
from fedmq.storage.locks import locked

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
    """Create a folder atomically, and only once even if several processes request it at the same time.

    Args:
        folder: the folder; returned as it is if it exists.
        fill: writes the contents into the empty folder that it receives.

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


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        # Reading or even opening a pipe or device may block forever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(str(path), "no regular file", "a readable file")
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(str(path), error.strerror or str(error), "a readable file") from None
