"""Read back JSON that fedmq wrote, checked: such files are cut short, edited, and taken from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from fedmq.errors import InputError
from fedmq.text import printable

#: 32 bytes in hexadecimal.
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_NO_OBJECT = ("model_type", "model_attributes_type")  # pydantic's names of what is wrong
_SHOWN = 60  # characters of a value that an error shows


class Stored(BaseModel):
    """Base of the records in files: the keys that readers rely on. There may be others, and a record keeps them."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    def plain(self) -> dict[str, JsonValue]:
        """As JSON-serialisable data: the fields that were given, in the order of the type, then the other keys."""
        return self.model_dump(exclude_unset=True)


Record = TypeVar("Record", bound=BaseModel)


def read_json(path: Path, schema: type[Record], allowed: str) -> Record:
    """A file with one JSON object.

    Args:
        path: the file.
        schema: what it must hold.
        allowed: what the user should have given, for the error.

    Raises:
        InputError: it cannot be read, is no JSON, or holds something else; the first wrong key is named.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InputError(str(path), error.strerror or str(error), allowed) from None
    return _checked(str(path), text, schema, allowed)


def read_lines(path: Path, schema: type[Record], allowed: str) -> Iterator[Record]:
    """The whole JSON lines of a file; a last line that a crash left unfinished is passed over.

    Args:
        path: the file; without it there are no lines.
        schema: what every line must hold.
        allowed: what should have been there, for the error.

    Raises:
        InputError: a line is no JSON object or holds something else, or the file cannot be opened.
    """
    if not path.exists():
        return
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(str(path), error.strerror or str(error), allowed) from None
    with file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield _checked(f"{path}: line {number}", line, schema, allowed)


def _checked(place: str, text: bytes, schema: type[Record], allowed: str) -> Record:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError(place, "something that is not JSON", allowed) from None
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = _short(".".join(map(str, first["loc"])))
        found = "nothing" if first["type"] == "missing" else _short(first["input"])
        why = "an object" if first["type"] in _NO_OBJECT else first["msg"].lower()
        raise InputError(f"{place}: {key}" if key else place, found, f"{allowed} ({why})") from None


def _short(value: object) -> str:
    shown = printable(str(value))
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
