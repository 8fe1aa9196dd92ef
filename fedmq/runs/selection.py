"""Finished runs as people name them: a run by its folder, the rows of a comparison by the comparison's."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from fedmq.errors import InputError
from fedmq.storage.run_folder import RunFolder


@dataclass(frozen=True)
class Runs:
    """What stands under one name in a plot.

    Args:
        name: of the run's folder, or of the comparison's row.
        folders: of the one run, or of the row's, a seed each.
        comparison: whose row it is; None of a run that was named itself.
    """

    name: str
    folders: tuple[Path, ...]
    comparison: Path | None = None


def named(paths: Iterable[Path], silo: str | None = None) -> list[Runs]:
    """The runs that folders stand for, each once; with their folder where names are the same.

    Args:
        paths: of runs, or of what ``fedmq compare`` and ``fedmq sweep`` wrote.
        silo: whose own models are used, which the names say.

    Raises:
        InputError: a comparison's ``runs.csv`` is damaged, or a run in it is not where it was.
    """
    found: list[Runs] = []
    for path in dict.fromkeys(paths):
        alone = RunFolder(path).scenario.exists() or not (path / "runs.csv").exists()
        name = Path(os.path.abspath(path)).name  # noqa: PTH100 - a link is called by its own name
        found += [Runs(name, (path,))] if alone else _rows(path)
    if silo is not None:
        found = [replace(each, name=f"{each.name} {silo}") for each in found]
    names = [each.name for each in found]
    return [
        replace(each, name=f"{each.name} ({each.comparison or each.folders[0]})")
        if names.count(each.name) > 1
        else each
        for each in found
    ]


def _rows(comparison: Path) -> list[Runs]:
    """The rows of a comparison with a trained model, in its order."""
    table = comparison / "runs.csv"
    allowed = "what fedmq compare writes: a line of names, then each run's name, model_digest and folder"
    rows: dict[str, list[Path]] = {}
    try:
        with table.open(encoding="utf-8", newline="") as text:
            for record in csv.DictReader(text):
                name, digest, folder = (record.get(key) for key in ("name", "model_digest", "folder"))
                if not name or not folder or digest is None:
                    raise InputError(str(table), "a line without name, model_digest or folder", allowed)
                if digest:  # none before any training, where the folder is that of a run which trained later
                    rows.setdefault(name, []).append(Path(folder))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(str(table), str(error), allowed) from None
    if not rows:
        raise InputError(str(table), "no run", allowed)
    for folder in (folder for own in rows.values() for folder in own):
        if not os.path.isdir(folder):  # noqa: PTH112 - false of a name that is too long, too
            where = "a folder that is there; one that is relative is looked for where the command is given"
            raise InputError(str(table), str(folder), where)
    return [Runs(name, tuple(own), comparison) for name, own in rows.items()]
