"""Text that is safe on a terminal and in a spreadsheet, progress of long tasks, and suggestions for misspelt names.

Names, labels, paths and error texts come from other people's files and from peers. What a command prints goes through
:func:`print_line`, :func:`print_json` or :class:`fedmq.safe_console.SafeConsole`; there is no other use of ``print``.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import re
import shutil
import statistics
import sys
import textwrap
import traceback
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any

#: Minimum similarity (difflib ratio) at which a name is suggested.
_NEAR = 0.75


#: What only arranges text: line ends, tabs.
_LAYOUT = "\n\t"


def printable(text: str, keep: str = "") -> str:
    r"""Text in which no character controls a terminal: such characters are Python escapes, e.g. ``\x1b``.

    These are control characters (C0, DEL, C1), which begin the ANSI and OSC sequences; characters that change the
    direction of text or have no width; line and paragraph separators; surrogates, which stand for bytes of file names
    that are not UTF-8. Spaces of any width become a space.

    Args:
        text: text of any origin.
        keep: control characters to leave as they are.
    """
    return text if text.isprintable() else "".join(_shown(each, keep) for each in text)


def _shown(each: str, keep: str) -> str:
    if each.isprintable() or each in keep:
        return each
    return " " if unicodedata.category(each) == "Zs" else each.encode("unicode_escape").decode()


def printable_lines(text: str) -> str:
    """As :func:`printable`, for text of several lines: line ends and tabs are kept."""
    return printable(text, _LAYOUT)


def printable_on_a_page(text: str) -> str:
    """As :func:`printable_lines`, for HTML; the joiners of emoji and of scripts such as Persian are kept."""
    return printable(text, f"{_LAYOUT}\u200c\u200d")


def print_line(text: str, *, error: bool = False) -> None:
    """Print text of one or several lines, without characters that control a terminal, which breaks it between words.

    Args:
        text: text of any origin.
        error: print it to standard error.
    """
    stream, lines = sys.stderr if error else sys.stdout, printable_lines(text)
    if stream.isatty():
        lines = "\n".join(wrapped(line, shutil.get_terminal_size().columns) for line in lines.split("\n"))
    print(lines, file=stream, flush=True)


def wrapped(line: str, width: int) -> str:
    """A line broken between words if it is longer than a terminal is wide; paths and other long words stay whole."""
    if len(line) <= width:
        return line
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an unexpected error to standard error, in place of ``sys.excepthook``."""
    print_line("".join(traceback.format_exception(kind, error, trace)).rstrip(), error=True)


def json_text(value: object, *, indent: int | None = None, ascii_only: bool = True) -> str:
    """JSON in which characters that control a terminal are JSON escapes.

    Args:
        value: what to encode.
        indent: spaces per level; None for one line.
        ascii_only: also escape all other characters that are not ASCII.
    """
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)

    def escaped(found: re.Match[str]) -> str:
        return found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1]

    # Outside its strings JSON is ASCII without control characters, except for line ends.
    return re.sub(r"[^\x20-\x7e\n]", escaped, text)


def print_json(value: object, *, indent: int | None = 2, ascii_only: bool = True) -> None:
    """Print JSON; arguments as in :func:`json_text`."""
    print(json_text(value, indent=indent, ascii_only=ascii_only), flush=True)  # noqa: T201 - the one place


def size_text(number: float) -> str:
    """A number of bytes with its unit: ``640 B``, ``1.3 kB``, ``42.6 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def duration_text(seconds: float) -> str:
    """A time with its unit: ``40 s``, ``3.1 min``, ``2.5 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def tensor_text(size: int) -> str:
    """The size of a payload's tensors; one without tensors holds numbers or words only."""
    return size_text(size) if size else "numbers only"


def counted(count: int, noun: str) -> str:
    """A number with its noun: 1 difference, 2 differences."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def first_few(names: Sequence[str], most: int = 5) -> str:
    """Names for a message; of more than ``most``, the first ones and the number of the others.

    >>> first_few(["a", "b", "c"]), first_few(["a", "b", "c", "d"], 2)
    ('a, b, c', 'a, b and 2 more')
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def enumerated(names: Sequence[str]) -> str:
    """Names as a list in a sentence: ``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def spread(values: Sequence[float], form: str = "g") -> str:
    """Smallest and largest value with the median: ``7 to 60, median 38.5``; one value if all are equal.

    Args:
        values: at least one.
        form: format of each.
    """
    least, middle, most = (format(value, form) for value in (min(values), statistics.median(values), max(values)))
    return least if least == most else f"{least} to {most}, median {middle}"


def is_float(text: str) -> bool:
    """Whether Python reads a text as a float; ``nan`` and ``inf`` are."""
    try:
        float(text)
    except ValueError:
        return False
    return True


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


def nearest(name: str, known: Collection[str]) -> list[str]:
    """Similar known names, best first; all known names if there are none."""
    return difflib.get_close_matches(name, known, n=5) or list(known)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """``did you mean rcsr?`` if there are similar known names, otherwise an empty string."""
    near = difflib.get_close_matches(name, known, 3, _NEAR) or difflib.get_close_matches(name.lower(), known, 3, _NEAR)
    *others, last = near or [""]
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?" if near else ""


def one_of(name: str, known: Collection[str]) -> str:
    """Allowed names for an error message: a suggestion if there is one, then all."""
    return f"{did_you_mean(name, known)} one of {', '.join(known)}".strip()


Progress = Callable[[str, int, int], None]
"""Called with a description of the work, the number of items done, and the total number of items."""


def tell(progress: Progress | None, what: str, total: int) -> Callable[[int], None]:
    """A function that reports the number of items done, out of ``total``, to ``progress``."""

    def report(done: int) -> None:
        if progress is not None:
            progress(what, done, total)

    return report
