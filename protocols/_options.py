"""Checks of option values, in the words that :func:`protocols.options_of` turns into one line for the user."""

from __future__ import annotations

import math


def check(option: str, value: float, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    """Check that a number lies in [low, high], or above ``low`` where ``open_low``.

    Raises:
        ValueError: it does not; the message is ``option: found, allowed``.
    """
    inside = math.isfinite(value) and (low < value if open_low else low <= value) and value <= high
    if not inside:
        least = f"above {low:g}" if open_low else f"at least {low:g}"
        most = "" if math.isinf(high) else f" and at most {high:g}"
        raise ValueError(f"{option}: {value!r}, {least}{most}")
