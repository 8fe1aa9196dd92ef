"""Text that is safe to print."""

from __future__ import annotations


def printable(text: str) -> str:
    """Somebody else's text as one line with nothing in it that a terminal would obey."""
    return "".join(each if each.isprintable() else "?" for each in text)
