"""Removes what only the continuation of a run needs: checkpoints, and personal states of silos."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from fedmq.errors import InputError
from fedmq.storage.run_folder import RunFolder, writing


@dataclass(frozen=True)
class Pruning:
    """What can be removed from a finished run.

    Args:
        paths: folders of checkpoints and files of personal states.
        size: bytes that their removal frees.
        kept: why something is kept; empty if nothing is.
    """

    paths: tuple[Path, ...]
    size: int
    kept: str


def plan_pruning(folder: RunFolder, *, personalised: bool) -> Pruning:
    """Find what can be removed.

    Args:
        folder: the run folder.
        personalised: whether silos have personal models, for which ``fedmq search --silo`` needs the last checkpoint
            and each silo's newest personal state.

    Raises:
        InputError: the run is not finished, so that it needs its checkpoints.
    """
    if not folder.summary.exists():
        allowed = "a finished run; an unfinished one needs its checkpoints to be resumed"
        raise InputError(str(folder.root), "a run without summary.json", allowed)
    versions = sorted(folder.checkpoints.glob("version-*"), key=lambda path: (len(path.name), path.name))
    states = sorted(folder.silo_state("*").parent.glob("*/task-*.safetensors"))
    kept = ""
    if personalised and versions:
        newest = {path.parent: path for path in states}
        versions, states = versions[:-1], [path for path in states if newest[path.parent] != path]
        kept = "the last checkpoint and each silo's newest personal state are kept for `fedmq search --silo`"
    return Pruning((*versions, *states), _freed([*versions, *states]), kept)


def _freed(paths: list[Path]) -> int:
    """Bytes of files, each counted once and only if all of its hard links are removed."""
    links: dict[tuple[int, int], list[int]] = {}
    for path in paths:
        for file in [path, *path.rglob("*")] if path.is_dir() else [path]:
            if file.is_file() and not file.is_symlink():
                stat = file.stat()
                size, wanted, found = links.setdefault((stat.st_dev, stat.st_ino), [stat.st_size, stat.st_nlink, 0])
                links[stat.st_dev, stat.st_ino] = [size, wanted, found + 1]
    return sum(size for size, wanted, found in links.values() if found == wanted)


def prune(folder: RunFolder, pruning: Pruning) -> None:
    """Remove what :func:`plan_pruning` found, and folders that are empty afterwards.

    Raises:
        InputError: a path cannot be removed.
    """
    for path in pruning.paths:
        with writing(path):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    silos = folder.silo_state("*").parent
    for empty in [*silos.glob("*"), silos, folder.checkpoints]:
        if empty.is_dir() and not any(empty.iterdir()):
            empty.rmdir()
