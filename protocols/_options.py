"""Option values, checked in words that make one line for the user."""

from __future__ import annotations

import math

from fedmq.errors import InputError
from fedmq.federation.protocol import Context


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


def refuse_other_bases(protocol: str, context: Context) -> None:
    """Refuse every base loss but ``info_nce`` for a method whose silos' loss is its own reading of that one.

    Raises:
        InputError: the scenario's objective is another.
    """
    base = context.objective.base
    if base != "info_nce":
        raise InputError("objective.base", base, f"info_nce, of which {protocol}'s own loss is made")
