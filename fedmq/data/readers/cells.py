"""Cells of a table that hold several captions or labels, such as ``dog|sky`` and ``['dog', 'sky']``."""

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


def captions_of(place: str, cell: str) -> list[str]:
    """The captions in a CSV cell: separated by ``|``, or a list of quoted texts; none if the cell says ``nan``.

    Raises:
        InputError: the cell looks like a list of another form, which would be mistaken for one caption.
    """
    found = _list_of(place, cell, _TEXTS)
    return [text for text in cell.split("|") if text.strip() not in MISSING] if found is None else found


def labels_of(place: str, cell: str) -> list[str]:
    """The labels in a CSV cell: separated by ``|``, or a list; none if the cell says ``nan``.

    Raises:
        InputError: the cell looks like several labels of another form, which would be mistaken for one label.
    """
    found = _list_of(place, cell, _TEXTS_OR_NUMBERS)
    if found is None and "|" not in cell and (separator := _SEPARATOR.search(cell.strip())):
        part = f"{separator[0]!r} is" if separator[0] else "the brackets are"
        allowed = f"labels separated by |; end the text with | if {part} part of one label"
        raise InputError(place, cell[:80], allowed)
    return [name for name in cell.split("|") if name.strip() not in MISSING] if found is None else found


def one_text(place: str, text: str, *, label: bool) -> str:
    """A caption or label of JSON, unchanged.

    Raises:
        InputError: it looks like a list, which would be taken for one caption or label.
    """
    if _list_of(place, text, _TEXTS_OR_NUMBERS if label else _TEXTS) is not None:
        raise InputError(place, text[:80], "a JSON list, not a text that holds a list")
    return text


def one_label(place: str, text: str) -> str:
    """A label that is a string in JSON instead of a list, unchanged.

    Raises:
        InputError: it looks like several labels.
    """
    if "|" in text or _SEPARATOR.search(text.strip()):
        raise InputError(place, text[:80], 'a list for several labels, ["dog", "sky"]; also for one label with a comma')
    return one_text(place, text, label=True)


def one_of_many(place: str, text: str) -> None:
    """Refuse a caption of a collection, in which any text occurs, that is a list as a whole.

    Raises:
        InputError: it is a list of quoted texts, which would be taken for one caption.
    """
    if text[:1] in "[({" and _TEXTS.fullmatch(text.strip()) and _ITEM.search(text):
        raise InputError(place, text[:80], "a list of texts, not a text that holds a list")


def _list_of(place: str, cell: str, pattern: re.Pattern[str]) -> list[str] | None:
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
