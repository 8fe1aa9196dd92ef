"""Write records as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

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
