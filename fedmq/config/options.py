"""Options of methods and objectives: a frozen dataclass is the schema of keys that a scenario does not know itself."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from fedmq.errors import InputError
from fedmq.text import did_you_mean

T = TypeVar("T")


def schema_problem(schema: object) -> str | None:
    """What keeps an object from being the schema of options; None if nothing does."""
    if not (isinstance(schema, type) and dataclasses.is_dataclass(schema)):
        return "no dataclass"
    missing = dataclasses.MISSING
    without = [field.name for field in dataclasses.fields(schema) if field.default is field.default_factory is missing]
    return f"a dataclass with no default for {', '.join(without)}" if without else None


def parsed(schema: type[T], raw: Mapping[str, object], place: str) -> T:
    """An options dataclass from a scenario's keys, defaults filled in, types and bounds checked.

    Args:
        schema: a frozen dataclass.
        raw: option name to value as YAML gives it.
        place: what the names stand under, for the error.

    Raises:
        InputError: an unknown option, a wrong type or a value out of bounds.
    """
    hints = get_type_hints(schema)
    known = [field.name for field in dataclasses.fields(schema)]  # type: ignore[arg-type]
    for option in raw:
        if option not in known:
            allowed = f"one of the options {', '.join(known)}" if known else "no option: there are none"
            raise InputError(place, option, f"{did_you_mean(option, known)} {allowed}".strip())
    values: dict[str, Any] = {}
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
    """Options that are set to something of their own though what they are of is off.

    An options dataclass says in ``OF`` what its options are of: condition to patterns of options. A condition is
    ``switch``, on unless it is false, 0 or "none", or ``switch=value``, or several of these with "|" between them,
    of which one must hold. A switch is another option, or a key of ``around``.

    Args:
        options: a frozen dataclass's instance.
        around: other keys of the scenario to their values.

    Yields:
        The option, its value, and the switches with the values they have, as a scenario writes them.
    """
    values = {**around, **vars(options)}
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    told = set()
    for condition, names in getattr(options, "OF", {}).items():
        terms = [term.partition("=")[::2] for term in condition.split("|")]
        if any(_written(values[switch]) == wanted if wanted else _on(values[switch]) for switch, wanted in terms):
            continue
        off = " and ".join(dict.fromkeys(f"{switch}: {_written(values[switch])}" for switch, _ in terms))
        for name in (option for pattern in names for option in fnmatch.filter(defaults, pattern)):
            if name not in told and values[name] != defaults[name]:
                told.add(name)
                yield name, values[name], off


def _on(value: object) -> bool:
    return value not in (False, 0, "none", None)


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _number(value: object) -> object:
    """YAML 1.1 reads ``1e-3`` as a string; take it for the number it means."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def as_plain(options: object) -> dict[str, object]:
    """An options dataclass as a scenario writes it: JSON-serialisable, tuples as lists."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(options).items()}
