"""Reading a scenario's YAML file: settings over it, validation, and errors of one line that name file, line and key."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from fedmq.errors import InputError
from fedmq.scenario import Scenario


class _Lines(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys, which YAML would silently let win."""


def _mapping(loader: _Lines, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            what = "a mapping or list in place of a key; text with braces needs quotes"
            raise yaml.constructor.ConstructorError(None, None, what, key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is there twice", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Lines.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping.

    Raises:
        InputError: the file is missing, unreadable, no YAML, or no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(str(path), "no such file", "a scenario file (YAML)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(str(path), str(error), "a readable UTF-8 file") from None
    try:
        loaded = yaml.load(text, Loader=_Lines)  # noqa: S506 - a SafeLoader subclass
        json.dumps(loaded, default=str, skipkeys=True)  # an alias may hold itself
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise InputError(f"{path}: line {line}", error.problem or "not YAML", "valid YAML") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none, such as 2026-13-01
        raise InputError(str(path), str(error).splitlines()[0], "valid YAML") from None
    except RecursionError:
        raise InputError(str(path), "brackets or indents nested far too deep", "valid YAML") from None
    if not isinstance(loaded, dict):
        raise InputError(str(path), type(loaded).__name__, "a mapping of scenario keys")
    return loaded


class Overridden(dict[str, Any]):
    """A raw scenario that knows which of its keys were set over the file's, for errors to name the right place.

    Args:
        values: of the raw scenario.
        keys: as ``--set`` names them, the last one last.
    """

    def __init__(self, values: Mapping[str, Any], keys: Sequence[str]) -> None:
        super().__init__(values)
        self.overridden = tuple(keys)


def apply_settings(raw: Mapping[str, Any], settings: Sequence[str]) -> Overridden:
    """Apply ``key.sub=value`` settings (``--set``) to a raw scenario; values are read as YAML.

    Raises:
        InputError: a setting is not ``key=value``, or goes below something that is no mapping.
    """
    result: dict[str, Any] = {**raw}
    keys = [*(raw.overridden if isinstance(raw, Overridden) else ())]
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise InputError("--set", setting, "key=value, e.g. --set training.learning_rate=0.001")
        try:
            value = yaml.safe_load(text)
            json.dumps(value, default=str, skipkeys=True)  # an alias may hold itself
        except (yaml.YAMLError, ValueError, RecursionError):
            raise InputError(f"--set {key}", text[:60], "a YAML value") from None
        place = result
        *parents, leaf = key.split(".")
        for parent in parents:
            below = place.get(parent)
            if isinstance(below, str) and parent in ("protocol", "objective"):
                below = {"name" if parent == "protocol" else "base": below}
            if isinstance(below, int | float) and parent == "participation":
                below = {"rate": below}
            if below is not None and not isinstance(below, dict):
                raise InputError(f"--set {key}", setting, f"{parent} holds no further keys")
            place[parent] = {**(below or {})}
            place = place[parent]
        if leaf in ("protocol", "objective") and not parents and isinstance(value, str):
            value = {"name" if leaf == "protocol" else "base": value}
        place[leaf] = value
        keys.append(key)
    return Overridden(result, keys)


def _line_of(path: Path, location: Sequence[str | int]) -> int | None:
    """The line of a key in a YAML file, or None (key came from --set or from a default)."""
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return None
    line = None
    for part in location:
        if not isinstance(node, yaml.MappingNode):
            break
        match = [(key, value) for key, value in node.value if key.value == str(part)]
        if not match:
            break
        line, node = match[0][0].start_mark.line + 1, match[0][1]
    return line


def nearest(name: str, known: Collection[str]) -> list[str]:
    """The names a user may have meant, best first; all of them if none is near."""
    return difflib.get_close_matches(name, known, n=5) or list(known)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in a type: of its options, items and values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _keys_at(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """The keys that a place in a model knows; pydantic's places also hold indices and kinds of a union."""
    models = [model]
    for part in location:
        fields = [each.model_fields[part] for each in models if part in each.model_fields]
        of_kind = [
            each for each in models if any(part in get_args(field.annotation) for field in each.model_fields.values())
        ]
        models = [below for field in fields for below in _models(field.annotation)] or of_kind or models
    return list(dict.fromkeys(name for each in models for name in each.model_fields))


def _place_of(path: Path, location: Sequence[str | int], settings: Sequence[str]) -> str:
    """File with line and key; for what was set over the file, the setting in place of the line."""
    key = ".".join(map(str, location))
    given = [each for each in settings if f"{key}.".startswith(f"{each}.")]
    if given:
        return f"{path}: --set {given[-1]}" + (f": {key}" if given[-1] != key else "")
    line = _line_of(path, location)
    return f"{path}" + (f": line {line}" if line else "") + (f": {key}" if key else "")


def input_error(
    error: ValidationError,
    path: Path,
    prefix: Sequence[str] = (),
    *,
    model: type[BaseModel] | None = None,
    settings: Sequence[str] = (),
) -> InputError:
    """One line for the first thing pydantic found wrong, with file, line and key.

    Args:
        error: what pydantic found.
        path: the file.
        prefix: keys above what was validated.
        model: what was validated; with it an unknown key's error names the nearest ones there are.
        settings: keys whose values are not the file's but ``--set``'s.
    """
    first = error.errors()[0]
    location = [*prefix, *(part for part in first["loc"] if isinstance(part, str | int))]
    where = _place_of(path, location, settings)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        found: object = "nothing"
        message = "a value is required here"
    elif first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        found, message = str(location[-1]), "a known key"
        if model is not None:
            below = first["loc"][:-1]
            message += f": {', '.join(nearest(found, _keys_at(model, below)))}"
    elif first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        # Pydantic names the discriminator in quotes, and the tags likewise.
        context = first["ctx"]
        where = _place_of(path, [*location, context["discriminator"].strip("'")], settings)
        found = context.get("tag", "nothing")
        message = f"one of {context['expected_tags']}" if "tag" in context else "a value is required here"
    elif first["type"] in ("model_type", "model_attributes_type"):
        found, message = first["input"], "a mapping"
        if model is not None:
            message += f" with keys of {', '.join(_keys_at(model, first['loc']))}"
    elif first["type"] in ("tuple_type", "list_type"):
        found, message = first["input"], "a list"
    elif not location or isinstance(first["input"], dict | BaseModel):
        found = "an inconsistent scenario"
    else:
        found = first["input"]
    return InputError(where, found, message[0].lower() + message[1:])


def parse(raw: Mapping[str, Any], path: Path) -> Scenario:
    """Validate a raw scenario.

    Raises:
        InputError: anything is not allowed; ``path`` is named as the place.
    """
    for command in ("compare", "sweep"):
        if command in raw:
            raise InputError(str(path), "a comparison file", f"a scenario; fedmq {command} {path} runs comparisons")
    settings = raw.overridden if isinstance(raw, Overridden) else ()
    try:
        scenario = Scenario.model_validate(raw)
    except ValidationError as error:
        raise input_error(error, path, model=Scenario, settings=settings) from None
    for location, value in _truths_for_numbers(raw, scenario):
        raise InputError(_place_of(path, location, settings), value, "a number; true and false are none")
    return scenario


def _truths_for_numbers(raw: Any, made: Any, above: tuple[str | int, ...] = ()) -> Iterator[tuple[Any, bool]]:
    """Where a raw value is true or false and became something else: pydantic takes them for 1 and 0.

    Its strict mode would also refuse ``1e-4``, which is a text to YAML 1.1, and a path, which always is.
    """
    if isinstance(raw, bool):
        if not isinstance(made, bool):
            yield above, raw
    elif isinstance(raw, Mapping):
        for key, value in raw.items():
            below = made.get(key) if isinstance(made, Mapping) else getattr(made, str(key), value)
            yield from _truths_for_numbers(value, below, (*above, key))
    elif isinstance(raw, list | tuple) and isinstance(made, list | tuple):
        for place, pair in enumerate(zip(raw, made, strict=False)):
            yield from _truths_for_numbers(*pair, (*above, place))


def load(path: Path, settings: Sequence[str] = ()) -> Scenario:
    """Read, override and validate a scenario file.

    Raises:
        InputError: anything is not allowed.
    """
    return parse(apply_settings(read_yaml(path), settings), path)
