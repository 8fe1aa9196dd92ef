"""Reading and validating JSON files that fedmq wrote, which may since have been truncated, edited or replaced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic_core import ErrorDetails

from fedmq.errors import InputError
from fedmq.storage.regular_files import bounded_lines, open_regular, read_regular
from fedmq.text import printable

#: 32 bytes in hexadecimal.
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

#: A number of things.
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
#: A finite time, size or other quantity, at least 0.
Amount = Annotated[Finite, Field(ge=0)]


def _zoned(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError(f"{text} has no time zone")
    return text


#: An ISO 8601 date and time with its time zone.
DateTime = Annotated[str, AfterValidator(_zoned)]
#: What is allowed, by pydantic's error type, where its own words name Python classes or do not say it.
_ALLOWED = {
    "missing": "a value, as this key is required",
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "a mapping"),
    **dict.fromkeys(("tuple_type", "list_type"), "a list"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
}
_MAX_SHOWN = 60  # characters of a value in an error message


class Stored(BaseModel):
    """Base of the records in files: its fields are the keys that readers need; it keeps any other keys."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    def plain(self) -> dict[str, JsonValue]:
        """JSON-serialisable data: the fields that were set, in the order of declaration, then the other keys."""
        return self.model_dump(exclude_unset=True)


Record = TypeVar("Record", bound=BaseModel)


def read_json(path: Path, schema: type[Record], allowed: str) -> Record:
    """Read a file with one JSON object.

    Raises:
        InputError: the file cannot be read, is not JSON, or does not match the schema; names the first invalid key.
    """
    return checked_json(str(path), read_regular(path, allowed), schema, allowed)


def read_lines(path: Path, schema: type[Record], allowed: str) -> Iterator[Record]:
    """Read a file of JSON lines of a schema, without a last line that a crash left incomplete; a missing file has none.

    Raises:
        InputError: the file cannot be opened, or a line is not JSON or does not match the schema.
    """
    if not path.exists():
        return
    with open_regular(path, allowed) as file:
        for number, line in bounded_lines(path, file, allowed):
            if line.endswith(b"\n"):
                yield checked_json(f"{path}: line {number}", line, schema, allowed)


def checked_json(place: str, text: bytes, schema: type[Record], allowed: str) -> Record:
    """A JSON object from its text.

    Raises:
        InputError: it is not JSON, or does not match the schema; names the first invalid key.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError(place, "something that is not JSON", allowed) from None
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise refusal(place, error, allowed) from None


@dataclass(frozen=True)
class Problem:
    """The first thing that pydantic finds wrong, in its own words."""

    location: tuple[str | int, ...]  # keys and indices that lead to the value
    value: object  # the value as given; "nothing" if it is missing, words for several keys
    allowed: str  # what pydantic expects there

    @classmethod
    def of(cls, error: ErrorDetails) -> Problem:
        """The problem of one of pydantic's errors."""
        kind, value = error["type"], error["input"]
        if kind == "missing":
            value = "nothing"
        elif isinstance(value, dict | BaseModel):
            # A check of several keys together names them, and their values, in its message.
            value = "keys that do not fit together" if kind == "value_error" else "a mapping"
        message = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        return cls(error["loc"], value, _ALLOWED.get(kind, message[:1].lower() + message[1:]))


def refusal(place: str, error: ValidationError, allowed: str) -> InputError:
    """The error of one line for a record that does not fit its schema; names its first wrong key."""
    problem = Problem.of(error.errors(include_url=False)[0])
    key = _short(".".join(map(str, problem.location)))
    return InputError(f"{place}: {key}" if key else place, _short(problem.value), f"{allowed} ({problem.allowed})")


def _short(value: object) -> str:
    # Of bytes, which may be the content of a whole file, only the first.
    shown = printable(repr(value[:_MAX_SHOWN]) if isinstance(value, bytes) else str(value))
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
