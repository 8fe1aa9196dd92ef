"""Text that is safe to print on a terminal, and suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Collection

#: Smallest similarity (difflib ratio) at which a name is suggested.
_NEAR = 0.8


def printable(text: str) -> str:
    """Untrusted text as one line without control characters."""
    return "".join(each if each.isprintable() else "?" for each in text)


def nearest(name: str, known: Collection[str]) -> list[str]:
    """Similar known names, best first; all known names if there are none."""
    return difflib.get_close_matches(name, known, n=5) or list(known)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """``did you mean rcsr?`` if there are similar known names, otherwise an empty text."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=_NEAR)
    *others, last = near or [""]
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?" if near else ""


def one_of(name: str, known: Collection[str]) -> str:
    """Allowed names for an error message: a suggestion if there is one, then all."""
    return f"{did_you_mean(name, known)} one of {', '.join(known)}".strip()
