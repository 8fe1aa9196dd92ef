"""Checks of option values, with one-line errors for wrong ones."""

from __future__ import annotations

import math

from fedmq.config.options import OptionError
from fedmq.errors import InputError
from fedmq.federation.protocol import Context


def check(option: str, value: float, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    """Check that a number lies in [low, high], or above ``low`` where ``open_low``.

    Raises:
        OptionError: it does not.
    """
    inside = math.isfinite(value) and (low < value if open_low else low <= value) and value <= high
    if not inside:
        least = f"above {low:g}" if open_low else f"at least {low:g}"
        most = "" if math.isinf(high) else f" and at most {high:g}"
        raise OptionError(option, value, f"{least}{most}")


def refuse_other_bases(protocol: str, context: Context) -> None:
    """Reject every base loss but ``info_nce``, for methods that define their own variant of it.

    Raises:
        InputError: the scenario's objective has another base.
    """
    base = context.objective.base
    if base != "info_nce":
        raise InputError("objective.base", base, f"info_nce, the base that {protocol}'s loss is a variant of")
