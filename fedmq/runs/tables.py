"""CSV tables: records that a spreadsheet can open safely, and the runs that the table of a comparison lists."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedmq.errors import InputError
from fedmq.storage.regular_files import read_regular
from fedmq.storage.run_folder import RunFolder
from fedmq.text import is_float, printable

#: First characters of a cell that a spreadsheet takes for a formula; also their wide forms, for Excel in Japanese.
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def as_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Records as CSV with a header line; fields that a record lacks are empty, text is no formula."""
    names = list(dict.fromkeys(name for record in records for name in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writerow({name: csv_cell(name) for name in names})
    writer.writerows({name: csv_cell(value) for name, value in record.items()} for record in records)
    return text.getvalue()


def csv_cell(value: Any) -> Any:
    """A value for a cell; text that a spreadsheet would take for a formula begins with an apostrophe.

    Characters that control a terminal, and line ends, are escaped.
    """
    if not isinstance(value, str):
        return value
    shown = printable(value)
    return f"'{shown}" if shown.startswith(_FORMULA) and not is_float(shown) else shown


def csv_text(cell: str) -> str:
    """The text of a cell that :func:`csv_cell` made, with its escapes."""
    return cell[1:] if cell.startswith("'") and csv_cell(cell[1:]) == cell else cell


@dataclass(frozen=True)
class Runs:
    """Runs that a plot shows under one name.

    Args:
        name: name of the run's folder, or of the comparison's row.
        folders: folders of the single run, or of the row's runs, one per seed.
        comparison: folder of the comparison; None for a single run.
    """

    name: str
    folders: tuple[Path, ...]
    comparison: Path | None = None


def named(paths: Iterable[Path], silo: str | None = None) -> list[Runs]:
    """The runs in some folders, without duplicates; equal names are completed by the folder.

    Raises:
        InputError: a comparison's ``runs.csv`` is damaged, or one of its runs is not there.
    """
    runs: list[Runs] = []
    for path in dict.fromkeys(paths):
        is_run = RunFolder(path).scenario.exists() or not (path / "runs.csv").exists()
        name = Path(os.path.abspath(path)).name  # noqa: PTH100 - keeps the name of a symbolic link
        runs += [Runs(name, (path,))] if is_run else _rows(path)
    if silo is not None:
        runs = [replace(run, name=f"{run.name} {silo}") for run in runs]
    names = [run.name for run in runs]
    return [
        replace(run, name=f"{run.name} ({run.comparison or run.folders[0]})") if names.count(run.name) > 1 else run
        for run in runs
    ]


def _rows(comparison: Path) -> list[Runs]:
    """The rows of a comparison that have a trained model, in order."""
    table = comparison / "runs.csv"
    allowed = "what fedmq compare writes: a line of names, then each run's name, model_digest and folder"
    rows: dict[str, list[Path]] = {}
    try:
        text = io.StringIO(read_regular(table, allowed).decode("utf-8"), newline="")
        for record in csv.DictReader(text):
            cells = (record.get(key) for key in ("name", "model_digest", "folder"))
            name, digest, folder = (None if cell is None else csv_text(cell) for cell in cells)
            if not name or not folder or digest is None:
                raise InputError(str(table), "a line without name, model_digest or folder", allowed)
            if digest:  # zero-shot rows have no digest; their folder is that of a run that was trained later
                rows.setdefault(name, []).append(Path(folder))
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(str(table), str(error), allowed) from None
    if not rows:
        raise InputError(str(table), "no run", allowed)
    for path in (folder for folders in rows.values() for folder in folders):
        if not os.path.isdir(path):  # noqa: PTH112 - unlike Path, False for names that are too long
            where = "an existing folder; relative ones are looked up from the working directory"
            raise InputError(str(table), str(path), where)
    return [Runs(name, tuple(folders), comparison) for name, folders in rows.items()]
