"""The federated methods, one file each; found by name, so that a new file is all a new method needs."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from fedmq.errors import InputError
from fedmq.protocol import FederatedProtocol


def names() -> tuple[str, ...]:
    """Names of all methods, sorted: every module of this package whose name has no leading underscore."""
    return tuple(sorted(found.name for found in pkgutil.iter_modules(__path__) if not found.name.startswith("_")))


def load(name: str) -> type[FederatedProtocol]:
    """The class of a method.

    Raises:
        InputError: there is no such method.
    """
    if name not in names():
        raise InputError("protocol.name", name, ", ".join(names()))
    protocol: type[FederatedProtocol] = importlib.import_module(f"{__name__}.{name}").PROTOCOL
    return protocol


def summary(name: str) -> str:
    """First line of a method's docstring, for ``fedmq protocols``.

    Raises:
        InputError: there is no such method.
    """
    load(name)
    text = importlib.import_module(f"{__name__}.{name}").__doc__ or ""
    return text.strip().partition("\n")[0]


def options_of(protocol: type[FederatedProtocol], raw: Mapping[str, Any], place: str = "protocol") -> Any:
    """A method's options from the scenario's ``protocol:`` keys, defaults filled in, types and bounds checked.

    Args:
        protocol: from :func:`load`.
        raw: option name to value as YAML gives it.
        place: what the names stand under, for the error, e.g. ``"scenarios/x.yaml: protocol"``.

    Raises:
        InputError: an unknown option, a wrong type or a value out of bounds.
    """
    schema = protocol.Options
    hints = get_type_hints(schema)
    known = [field.name for field in dataclasses.fields(schema)]
    for option in raw:
        if option not in known:
            raise InputError(place, option, f"one of the options {', '.join(known)}")
    values = {}
    for option, raw_value in raw.items():
        value = _number(raw_value) if hints[option] is float else raw_value
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


def _number(value: object) -> object:
    """YAML 1.1 reads ``1e-3`` as a string; take it for the number it means."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
