"""Options of methods and objectives, each with a frozen dataclass as its schema."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from fedmq.errors import InputError
from fedmq.storage.json_files import Problem
from fedmq.text import did_you_mean

T = TypeVar("T")
#: Types whose equal values are the same value, unlike those of containers, whose items may differ in type.
_SCALARS = (bool, int, float, str, type(None))


class OptionError(ValueError):
    """The value of an option is not allowed; ``__post_init__`` of a schema raises it."""

    def __init__(self, option: str, found: object, allowed: str) -> None:
        self.option = option
        self.found = found
        self.allowed = allowed
        super().__init__(f"{option}: {found!r}, {allowed}")


def schema_problem(schema: object) -> str | None:
    """Why an object cannot be a schema of options; None if it can."""
    if not (isinstance(schema, type) and dataclasses.is_dataclass(schema)):
        return "not a dataclass"
    missing = dataclasses.MISSING
    without = [field.name for field in dataclasses.fields(schema) if field.default is field.default_factory is missing]
    return f"a dataclass without a default for {', '.join(without)}" if without else None


@functools.cache
def _hints(schema: type[Any]) -> dict[str, Any]:
    return get_type_hints(schema, include_extras=True)


@functools.cache
def _adapter(schema: type[Any], option: str) -> TypeAdapter[Any]:
    kind: Any = schema  # to mypy, a type is not hashable
    return TypeAdapter(_hints(kind)[option])


def parsed(schema: type[T], raw: Mapping[str, object], place: str) -> T:
    """An options dataclass from a scenario's keys, with defaults filled in, types and bounds checked.

    Args:
        schema: a frozen dataclass.
        raw: option name to value as read from YAML.
        place: section of the options, for errors.

    Raises:
        InputError: an unknown option, a wrong type or a value out of bounds.
    """
    kind: Any = schema  # to mypy, a type is not hashable
    known = {field.name: field.default for field in dataclasses.fields(schema)}  # type: ignore[arg-type]
    preset = preset_values(kind, raw.get("preset"))
    raw = {**{option: value for option, value in preset.items() if "." not in option}, **raw}
    for option in raw:
        if option not in known:
            allowed = f"one of the options {', '.join(known)}" if known else "no options"
            raise InputError(place, option, f"{did_you_mean(option, known)} {allowed}".strip())
    values: dict[str, Any] = {}
    for option, raw_value in raw.items():
        # A resolved scenario has every default filled in; a validator for each would take a silo's start 40 ms.
        if type(raw_value) in _SCALARS and type(raw_value) is type(known[option]) and raw_value == known[option]:
            values[option] = raw_value
            continue
        try:
            values[option] = _adapter(kind, option).validate_python(raw_value, strict=True)
        except ValidationError as error:
            allowed = Problem.of(error.errors(include_url=False)[0]).allowed
            raise InputError(f"{place}.{option}", raw_value, allowed) from None
    try:
        return schema(**values)
    except OptionError as error:
        raise InputError(f"{place}.{error.option}", error.found, error.allowed) from None
    except ValueError as error:  # of a user's own schema
        raise InputError(place, str(error), f"values that {schema.__name__} accepts") from None


def preset_values(schema: Any, name: object) -> Mapping[str, object]:
    """Options, and keys of other sections such as ``training.batch_size``, that a preset sets unless the scenario does.

    An options dataclass with the option ``preset`` declares them by the preset's name in ``PRESETS``.
    """
    presets: Mapping[str, Mapping[str, object]] = getattr(schema, "PRESETS", {})
    return presets.get(name, {}) if isinstance(name, str) else {}


def without_effect(options: Any, around: Mapping[str, object]) -> Iterator[tuple[str, object, str]]:
    """Options that are set although they have no effect because their switch is off.

    An options dataclass declares in ``OF`` the conditions of its options: a mapping from condition to option patterns.
    A condition is ``switch``, which holds unless the switch is false, 0, null or "none", or ``switch=value``, or
    several of these joined by "|", of which one must hold. A switch is another option or a key of ``around``.

    Args:
        options: instance of a frozen dataclass.
        around: other keys of the scenario with their values.

    Yields:
        The option, its value, and the switches with their values as written in a scenario.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    for name, off in _switched_off(options, around).items():
        if (value := getattr(options, name)) != defaults[name]:
            yield name, value, off


def beginnings(options: Any, around: Mapping[str, object]) -> Iterator[tuple[str, int, str, bool]]:
    """Options that say in which round a part of the method begins, as far as the part is switched on.

    An options dataclass declares in ``BEGINS`` what begins then: a mapping from option to words.

    Args:
        options: instance of a frozen dataclass.
        around: as in :func:`without_effect`.

    Yields:
        The option, the round, what begins, and whether the round is the option's default.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    off = _switched_off(options, around)
    for name, what in getattr(options, "BEGINS", {}).items():
        if name not in off:
            value = getattr(options, name)
            yield name, value, what, value == defaults[name]


def _switched_off(options: Any, around: Mapping[str, object]) -> dict[str, str]:
    """Options without effect, with the values of their switches as written in a scenario."""
    values, off_by = {**around, **vars(options)}, dict[str, str]()
    for condition, names in getattr(options, "OF", {}).items():
        terms = [term.partition("=")[::2] for term in condition.split("|")]
        if any(_written(values[switch]) == wanted if wanted else _on(values[switch]) for switch, wanted in terms):
            continue
        off = " and ".join(dict.fromkeys(f"{switch}: {_written(values[switch])}" for switch, _ in terms))
        for name in (option for pattern in names for option in fnmatch.filter(vars(options), pattern)):
            off_by.setdefault(name, off)
    return off_by


def _on(value: object) -> bool:
    return value not in (False, 0, "none", None)


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_plain(options: object) -> dict[str, object]:
    """An options dataclass as plain data: JSON-serialisable, tuples as lists."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(options).items()}
