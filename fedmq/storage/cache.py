"""The cache: content-addressed folders that are there complete or not at all."""

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

FORMAT: Final = 1  # of the folder; another number makes another folder


def cache_folder() -> Path:
    """Where prepared data and shared weights live: $FEDMQ_CACHE, else $XDG_CACHE_HOME/fedmq, else ~/.cache/fedmq."""
    if own := os.environ.get("FEDMQ_CACHE"):
        return Path(own)
    general = os.environ.get("XDG_CACHE_HOME")
    return (Path(general) if general else Path.home() / ".cache") / "fedmq"


def build_once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Make a folder that is there complete or not at all, once, however many processes ask for it.

    Args:
        folder: where it will be.
        fill: writes everything into the empty folder it is given.

    Raises:
        RunError: the cache cannot be written.
    """
    if folder.is_dir():
        return folder
    try:
        with locked(folder.with_name(f"{folder.name}.lock")):
            if not folder.is_dir():
                # Under the lock nobody else is building this one: what lies there is from a build that died.
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
    """SHA-256 (hex) over the canonical JSON of ``parts``: a folder's name in the cache."""
    return hashlib.sha256(json.dumps([FORMAT, *parts], sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        # A pipe or a device may have no end, and opening it may wait for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(str(path), "no regular file", "a readable file")
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(str(path), error.strerror or str(error), "a readable file") from None
