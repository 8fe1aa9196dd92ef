"""Text that is safe to print, and names that were nearly written right."""

from __future__ import annotations

import difflib
from collections.abc import Collection

#: How alike two names must be, as difflib measures it, for one to be suggested for the other.
_NEAR = 0.8


def printable(text: str) -> str:
    """Somebody else's text as one line with nothing in it that a terminal would obey."""
    return "".join(each if each.isprintable() else "?" for each in text)


def nearest(name: str, known: Collection[str]) -> list[str]:
    """The names a user may have meant, best first; all of them if none is near."""
    return difflib.get_close_matches(name, known, n=5) or list(known)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """``did you mean rcsr?`` where one or several known names are near, else nothing."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=_NEAR)
    *others, last = near or [""]
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?" if near else ""


def one_of(name: str, known: Collection[str]) -> str:
    """What an error says is allowed in place of a name: the near names first, then all."""
    return f"{did_you_mean(name, known)} one of {', '.join(known)}".strip()
