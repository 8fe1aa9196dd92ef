"""Parsing of options from a scenario into a dataclass, with one-line errors for wrong values."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from fedmq.errors import InputError
from fedmq.federation.protocol import Context

T = TypeVar("T")


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
    """Reject every base loss but ``info_nce``, for methods that define their own variant of it.

    Raises:
        InputError: the scenario's objective has another base.
    """
    base = context.objective.base
    if base != "info_nce":
        raise InputError("objective.base", base, f"info_nce, the base that {protocol}'s loss is a variant of")


def parsed(schema: type[T], raw: Mapping[str, Any], place: str) -> T:
    """Build an options dataclass from a scenario's keys; fills in defaults and checks types and bounds.

    Args:
        schema: a frozen dataclass.
        raw: option name to value as parsed from YAML.
        place: the options' parent key, for the error.

    Raises:
        InputError: an unknown option, a wrong type or a value out of bounds.
    """
    hints = get_type_hints(schema)
    known = [field.name for field in dataclasses.fields(schema)]  # type: ignore[arg-type]
    for option in raw:
        if option not in known:
            raise InputError(place, option, f"one of the options {', '.join(known)}")
    values = {}
    for option, raw_value in raw.items():
        value = _number(raw_value) if hints[option] in (float, float | None) else raw_value
        try:
            values[option] = TypeAdapter(hints[option]).validate_python(value, strict=True)
        except ValidationError as error:
            allowed = error.errors()[0]["msg"].removeprefix("Input should be ")
            raise InputError(f"{place}.{option}", raw_value, allowed) from None
    try:
        return schema(**values)
    except ValueError as error:  # __post_init__ says "option: found, allowed"
        option, _, rest = str(error).partition(": ")
        found, _, allowed = rest.partition(", ")
        raise InputError(f"{place}.{option}", values.get(option, found), allowed or str(error)) from None


def without_effect(options: Any, around: Mapping[str, object]) -> Iterator[tuple[str, object, str]]:
    """Options that are set to a non-default value but have no effect, because the feature they belong to is off.

    An options dataclass declares in ``OF`` when its options have an effect: condition to patterns of option names. A
    condition is ``switch``, which holds unless it is false, 0 or "none", or ``switch=value``, or several of these
    separated by "|", of which one must hold. A switch is another option, or a key of ``around``.

    Args:
        options: an instance of a frozen dataclass.
        around: other keys of the scenario to their values.

    Yields:
        The option, its value, and the switches with their current values, as written in a scenario.
    """
    values = {**around, **vars(options)}
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    reported = set()
    for condition, names in getattr(options, "OF", {}).items():
        terms = [term.partition("=")[::2] for term in condition.split("|")]
        if any(_written(values[switch]) == wanted if wanted else _on(values[switch]) for switch, wanted in terms):
            continue
        off = " and ".join(dict.fromkeys(f"{switch}: {_written(values[switch])}" for switch, _ in terms))
        for name in (option for pattern in names for option in fnmatch.filter(defaults, pattern)):
            if name not in reported and values[name] != defaults[name]:
                reported.add(name)
                yield name, values[name], off


def _on(value: object) -> bool:
    return value not in (False, 0, "none", None)


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _number(value: object) -> object:
    """Convert a numeric string to float: YAML 1.1 reads ``1e-3`` as a string."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def as_plain(options: Any) -> dict[str, Any]:
    """An options dataclass as a JSON-serialisable dict, tuples as lists."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(options).items()}
