"""Finished runs as people name them: a run by its folder, the rows of a comparison by the comparison's."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedmq.errors import InputError
from fedmq.runfolder import RunFolder


@dataclass(frozen=True)
class Runs:
    """What stands under one name in a plot.

    Args:
        name: of the run's folder, or of the comparison's row.
        folders: of the one run, or of the row's, a seed each.
    """

    name: str
    folders: tuple[Path, ...]


def named(paths: Iterable[Path], silo: str | None = None) -> list[Runs]:
    """The runs that folders stand for, under names that differ.

    Args:
        paths: of runs, or of what ``fedmq compare`` and ``fedmq sweep`` wrote.
        silo: whose own models are used, which the names say.

    Raises:
        InputError: a comparison's ``runs.csv`` is damaged, or a run in it is not where it was.
    """
    found: list[Runs] = []
    for path in paths:
        table = path / "runs.csv"
        alone = RunFolder(path).scenario.exists() or not table.exists()
        found += [Runs(path.resolve().name, (path,))] if alone else _rows(table)
    return _distinct(found if silo is None else [replace(each, name=f"{each.name} {silo}") for each in found])


def _rows(table: Path) -> list[Runs]:
    """The rows of a comparison, in its order."""
    allowed = "what fedmq compare writes: a line of names with name and folder, then a line for each run"
    rows: dict[str, list[Path]] = {}
    try:
        with table.open(encoding="utf-8", newline="") as text:
            for record in csv.DictReader(text):
                name, folder = record.get("name"), record.get("folder")
                if not name or not folder:
                    raise InputError(str(table), "a line without name or folder", allowed)
                rows.setdefault(name, []).append(Path(folder))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(str(table), str(error), allowed) from None
    if not rows:
        raise InputError(str(table), "no run", allowed)
    for folder in (folder for own in rows.values() for folder in own):
        if not folder.is_dir():
            where = "a folder that is there; one that is relative is looked for where the command is given"
            raise InputError(str(table), str(folder), where)
    return [Runs(name, tuple(own)) for name, own in rows.items()]


def _distinct(runs: Sequence[Runs]) -> list[Runs]:
    names = [each.name for each in runs]
    return [
        replace(each, name=f"{each.name} ({names[: place + 1].count(each.name)})")
        if names.count(each.name) > 1
        else each
        for place, each in enumerate(runs)
    ]
