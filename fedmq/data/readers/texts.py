"""Captions and labels in one field: a cell of a table such as ``dog|sky`` or ``['dog', 'sky']``, or a value of JSON."""

from __future__ import annotations

import json
import re
from ast import literal_eval

from fedmq.errors import InputError

_TEXT = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_NUMBER = r"-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,18})?"
_BRACKETS = ("[]", "()", "{}")
_LIST_START = re.compile(r"[\[({]\s*b?['\"]|b['\"]|(?:array|frozenset|set|tuple|list|Index)\(")
#: Commas and semicolons, also those of Chinese, Japanese and Arabic; tags next to each other.
_SEPARATOR = re.compile(r"[,;\t\n\uff0c\u3001\uff1b\u060c\u061b]|(?<=[^\s<>]>)\s*(?=<[^\s<>])")
#: How pandas writes a missing value as text.
MISSING = ("nan", "NaN", "<NA>")


def _listed(item: str) -> re.Pattern[str]:
    """A list, tuple or set with commas between its items, as Python, pandas and JSON write it."""
    return re.compile(rf"[\[({{]\s*(?:{item}\s*(?:,\s*{item}\s*)*,?\s*)?[\])}}]", re.DOTALL)


_TEXTS, _TEXTS_OR_NUMBERS = _listed(_TEXT), _listed(f"(?:{_TEXT}|{_NUMBER})")
_ITEM = re.compile(f"{_TEXT}|{_NUMBER}", re.DOTALL)


def captions_in_cell(place: str, cell: str) -> list[str]:
    """The captions in a cell: separated by ``|``, or a list of quoted texts; none if the cell says ``nan``.

    Raises:
        InputError: the cell looks like a list of another form, which would be mistaken for one caption.
    """
    found = _list_in(place, cell, _TEXTS)
    return [text for text in cell.split("|") if text.strip() not in MISSING] if found is None else found


def labels_in_cell(place: str, cell: str) -> list[str]:
    """The labels in a cell: separated by ``|``, or a list; none if the cell says ``nan``.

    Raises:
        InputError: the cell looks like several labels of another form, which would be mistaken for one label.
    """
    found = _list_in(place, cell, _TEXTS_OR_NUMBERS)
    if found is None and "|" not in cell:
        _one_label(place, cell)
    return [name for name in cell.split("|") if name.strip() not in MISSING] if found is None else found


def texts_of(place: str, value: object, *, label: bool = False) -> list[str]:
    """The texts that a value of JSON or of a table with types holds: one, a list, or none; labels may be numbers.

    Raises:
        InputError: it holds something else, or a text that looks like several.
    """
    several = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(text, (str, int) if label else str) or isinstance(text, bool) for text in several):
        raise InputError(place, repr(value)[:80], "a text or a list of texts")
    texts = [str(text) for text in several]
    for text in texts:
        if label and _list_in(place, text, _TEXTS_OR_NUMBERS) is not None:
            raise InputError(place, text[:80], "a list, not a text that holds a list")
        if label and not isinstance(value, list):
            _one_label(place, text)
        # Captions may be any text, but for one that is a list as a whole.
        if not label and text[:1] in ("[", "(", "{") and _TEXTS.fullmatch(text.strip()) and _ITEM.search(text):
            raise InputError(place, text[:80], "a list of texts, not a text that holds a list")
    return [stripped for text in texts if (stripped := text.strip())]


def lines_of(text: str) -> tuple[str, ...]:
    """The captions or labels in a text file, one per line, without empty lines and repetitions."""
    return tuple(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))


def _one_label(place: str, text: str) -> None:
    """Refuse a text that looks like several labels."""
    if separator := re.search(r"\|", text) or _SEPARATOR.search(text.strip()):
        part = f"{separator[0]!r} is" if separator[0] else "the brackets are"
        allowed = f"labels separated by | in a table, a list in JSON; if {part} part of one label, it ends with |"
        raise InputError(place, text[:80], f"{allowed} or is in a list")


def _list_in(place: str, cell: str, pattern: re.Pattern[str]) -> list[str] | None:
    """Items of a list in a text; None if the text is not a list."""
    text = cell.strip()
    bracketed = text[:1] + text[-1:] in _BRACKETS
    if bracketed and pattern.fullmatch(text):
        try:
            return [_value(item) for item in _ITEM.findall(text)]
        except (ValueError, SyntaxError):  # an escape that does not exist
            pass
    elif not _LIST_START.match(text) and not (bracketed and pattern is _TEXTS_OR_NUMBERS):
        return None
    raise InputError(place, text[:80], "texts separated by |, or a list of quoted texts such as ['dog', 'sky']")


def _value(item: str) -> str:
    """An item of a list: JSON where it is JSON, whose escapes of two halves of a character Python does not know."""
    try:
        return str(json.loads(item))
    except ValueError:
        return str(literal_eval(item))
