"""Reads a scenario's YAML file: settings, validation, and one-line errors that name file, line and key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fedmq.config.faults import FAULTS
from fedmq.config.scenario import Backbone, Scenario
from fedmq.config.yaml_files import ERRORS, line_at, read_yaml
from fedmq.config.yaml_files import parse as parse_yaml
from fedmq.errors import InputError
from fedmq.storage.regular_files import is_file
from fedmq.text import did_you_mean, first_few, one_of

#: Keys of a data section that are paths.
DATA_PATHS = ("path", "annotations", "images")


class Overridden(dict[str, object]):
    """A raw scenario with the keys that were overridden, so that errors name the right place.

    Args:
        values: the raw scenario.
        keys: keys given with ``--set``, in order.
    """

    def __init__(self, values: Mapping[str, object], keys: Sequence[str]) -> None:
        super().__init__(values)
        self.overridden = tuple(keys)


def apply_settings(raw: Mapping[str, object], settings: Sequence[str]) -> Overridden:
    """Apply ``key.sub=value`` settings (``--set``) to a raw scenario; values are read as YAML.

    The last setting of a key counts. A setting of a section, such as ``protocol``, is applied before settings of its
    keys, such as ``protocol.mu``, regardless of their order, so that it does not overwrite them.

    Raises:
        InputError: a setting is not ``key=value``, or is for a key in something that is not a mapping.
    """
    result: dict[str, object] = {**raw}
    keys = [*(raw.overridden if isinstance(raw, Overridden) else ())]
    for key, value in _in_order([_read_setting(setting) for setting in settings]):
        place = result
        *parents, leaf = key.split(".")
        for parent in parents:
            below = _long_form(parent, place.get(parent)) if place is result else place.get(parent)
            if below is not None and not isinstance(below, dict):
                raise InputError(
                    f"--set {key}", value, f"no key in {parent}, which is not a mapping; set {parent} itself"
                )
            inner: dict[str, object] = {**(below or {})}
            place[parent] = inner
            place = inner
        place[leaf] = value
        keys.append(key)
    return Overridden(result, keys)


def _read_setting(setting: str) -> tuple[str, object]:
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise InputError("--set", setting, "key=value, e.g. --set training.learning_rate=0.001")
    try:
        value = parse_yaml(text)
    except ERRORS:
        raise InputError(f"--set {key}", text[:60], "a YAML value") from None
    return key, _long_form(key, value)


def _long_form(key: str, value: object) -> object:
    """The mapping that the short form of a section stands for; other values unchanged."""
    if isinstance(value, str) and key in ("protocol", "objective"):
        return {"name" if key == "protocol" else "base": value}
    if isinstance(value, int | float) and not isinstance(value, bool) and key == "participation":
        return {"rate": value}
    return value


def _in_order(settings: Sequence[tuple[str, object]]) -> list[tuple[str, object]]:
    """Settings in the order in which they are applied: a section before its keys.

    A setting of a key is dropped if a later setting of the section contains the key.
    """
    kept = [
        (key, value)
        for number, (key, value) in enumerate(settings, 1)
        if not any(
            key.startswith(f"{section}.") and _contains(later, key[len(section) + 1 :])
            for section, later in settings[number:]
        )
    ]
    return sorted(kept, key=lambda setting: setting[0].count("."))


def _contains(value: object, key: str) -> bool:
    """Whether a section's value determines a key in it; a value that is not a mapping determines every key."""
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return True
        if part not in value:
            return False
        value = value[part]
    return True


def _as_written(location: Sequence[str | int]) -> list[str | int]:
    """A location as in the file; pydantic's also contain the kinds of unions and the types it tried."""
    kept: list[str | int] = []
    for before, part in zip([None, *location], location, strict=False):
        of_kind = isinstance(before, int) and part in FAULTS
        if not (of_kind or part in _TRIED or re.search(r"[\[(]", str(part))):
            kept.append(part)
    return kept


#: Pydantic's error types of unknown keys.
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
#: Number of further unknown keys that one message lists.
LISTED = 10
#: Type names in pydantic's locations of union errors.
_TRIED = ("str", "int", "float", "bool")


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in a type annotation, including those of unions, lists and mappings."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _keys_at(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """Known keys at a location in a model; the location may contain indices and kinds of a union."""
    models = [model]
    for part in location:
        fields = [each.model_fields[part] for each in models if part in each.model_fields]
        of_kind = [
            each for each in models if any(part in get_args(field.annotation) for field in each.model_fields.values())
        ]
        models = [below for field in fields for below in _models(field.annotation)] or of_kind or models
    return list(dict.fromkeys(name for each in models for name in each.model_fields))


def place_of(path: Path, location: Sequence[str | int], settings: Sequence[str] = ()) -> str:
    """File, line and key of a location; the setting instead of the line if the key was overridden."""
    key = ".".join(map(str, location))
    given = [each for each in settings if f"{key}.".startswith(f"{each}.")]
    if given:
        return f"{path}: --set {given[-1]}" + (f": {key}" if given[-1] != key else "")
    line = line_at(path, tuple(location))
    return f"{path}" + (f": line {line}" if line else "") + (f": {key}" if key else "")


def input_error(
    error: ValidationError,
    path: Path,
    prefix: Sequence[str] = (),
    *,
    model: type[BaseModel] | None = None,
    settings: Sequence[str] = (),
) -> InputError:
    """The first error that pydantic found, as one line with file, line and key.

    Args:
        error: pydantic's error.
        path: the file.
        prefix: keys above the validated part.
        model: the validated model, for suggestions of known keys.
        settings: keys given with ``--set``.
    """
    # A misspelt key causes two errors, unknown and missing: the unknown key helps more.
    errors = sorted(error.errors(), key=lambda each: each["type"] not in _UNKNOWN)
    first = errors[0]
    location = [*prefix, *_as_written(first["loc"])]
    where = place_of(path, location, settings)
    # A union has an error for each type that it allows.
    tried = [each for each in errors if _as_written(each["loc"]) == _as_written(first["loc"])]
    messages = [each["msg"].removeprefix("Value error, ") for each in tried]
    rest = (each.removeprefix("Input should be ") for each in messages[1:])
    message = " or ".join(dict.fromkeys([messages[0], *rest]))
    message = message.replace("a valid tuple", "a list").replace("a valid string", "text")
    if first["type"] == "missing":
        found: object = "nothing"
        message = "a value is required here"
    elif first["type"] == "section_missing":
        where, found = place_of(path, [*location, first["ctx"]["section"]], settings), "nothing"
    elif first["type"] in _UNKNOWN:
        found, message = str(first["loc"][-1])[:80], "a known key"
        if model is not None:
            keys = _keys_at(model, first["loc"][:-1])
            message += f"; {hint}" if (hint := did_you_mean(found, keys)) else f": {', '.join(keys)}"
    elif first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        # Pydantic quotes the discriminator.
        context = first["ctx"]
        where = place_of(path, [*location, context["discriminator"].strip("'")], settings)
        found = context.get("tag", "nothing")
        kinds = [each.strip(" '") for each in context.get("expected_tags", "").split(",")]
        message = one_of(str(found), kinds) if "tag" in context else "a value is required here"
    elif first["type"] in ("model_type", "model_attributes_type"):
        found, message = first["input"], "a mapping"
        if model is not None:
            message += f" with keys of {', '.join(_keys_at(model, first['loc']))}"
    elif first["type"] in ("tuple_type", "list_type") and len(tried) == 1:
        found, message = first["input"], "a list"
    elif not location or isinstance(first["input"], dict | BaseModel):
        found = "an inconsistent scenario"
    else:
        found = first["input"]
    if first["type"] == "literal_error" and isinstance(found, str):
        names = re.findall(r"'([^']+)'", first["ctx"]["expected"])
        message = f"{did_you_mean(found, names)} {message}".strip()
    also = _more_unknown(errors, path, prefix, settings) if first["type"] in _UNKNOWN else ""
    return InputError(where, found, message[0].lower() + message[1:] + also)


def _more_unknown(errors: Sequence[ErrorDetails], path: Path, prefix: Sequence[str], settings: Sequence[str]) -> str:
    """The other unknown keys, so that the user can correct all of them at once."""
    places = [
        place_of(path, [*prefix, *_as_written(each["loc"])], settings).removeprefix(f"{path}: ")
        for each in errors
        if each["type"] in _UNKNOWN
    ]
    others = list(dict.fromkeys(places))[1:]
    if not others:
        return ""
    return f"; unknown as well: {first_few(others, LISTED)}"


def parse(raw: Mapping[str, object], path: Path) -> Scenario:
    """Validate a raw scenario.

    Raises:
        InputError: a key or value is not allowed; the place is in ``path``.
    """
    for command, kind in (("compare", "comparison"), ("sweep", "comparison"), ("tune", "tuning")):
        if command in raw:
            raise InputError(str(path), f"a {kind} file", f"a scenario; run it with fedmq {command} {path}")
    settings = raw.overridden if isinstance(raw, Overridden) else ()
    try:
        scenario = Scenario.model_validate(raw)
    except ValidationError as error:
        raise input_error(error, path, model=Scenario, settings=settings) from None
    for location, value in _booleans_for_numbers(raw, scenario):
        raise InputError(place_of(path, location, settings), value, "a number, not true or false")
    return scenario


def _booleans_for_numbers(
    raw: object, made: object, above: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], bool]]:
    """Locations of booleans that pydantic converted to numbers.

    Pydantic's strict mode would also refuse ``1e-4``, which YAML 1.1 reads as text, and paths.
    """
    if isinstance(raw, bool):
        if not isinstance(made, bool):
            yield above, raw
    elif isinstance(raw, Mapping):
        for key, value in raw.items():
            below = made.get(key) if isinstance(made, Mapping) else getattr(made, str(key), value)
            yield from _booleans_for_numbers(value, below, (*above, key))
    elif isinstance(raw, list | tuple) and isinstance(made, list | tuple):
        for place, pair in enumerate(zip(raw, made, strict=False)):
            yield from _booleans_for_numbers(*pair, (*above, place))


def load(path: Path, settings: Sequence[str] = ()) -> Scenario:
    """Read, override and validate a scenario file.

    Raises:
        InputError: a key or value is not allowed.
    """
    return parse(apply_settings(read_yaml(path), settings), path)


def with_absolute_paths(scenario: Scenario, *, weights: bool) -> Scenario:
    """A scenario with absolute paths. Symbolic links are kept, as related files may lie next to the link.

    Args:
        scenario: scenario as read; relative paths start at the working directory.
        weights: also make paths of existing backbone files and folders absolute.

    Raises:
        InputError: a path is invalid.
    """
    data, trace = scenario.data, scenario.participation.trace
    places = {key: getattr(data, key) for key in DATA_PATHS} if data is not None else {}
    parts: dict[str, dict[str, object]] = {
        "data": {key: absolute(f"data.{key}", path) for key, path in places.items() if path},
        "participation": {"trace": absolute("participation.trace", trace)} if trace else {},
        "backbone": _weights(scenario.backbone) if weights else {},
    }
    return scenario.model_copy(
        update={part: getattr(scenario, part).model_copy(update=changed) for part, changed in parts.items() if changed}
    )


def absolute(key: str, path: Path) -> Path:
    """An absolute path, with ``~`` expanded; symbolic links are kept.

    Raises:
        InputError: the path is invalid; its place is the key.
    """
    try:
        path = path.expanduser()
        path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # circular links, or a character that paths cannot contain
        raise InputError(key, str(path)[:200], f"a path ({error})") from None
    return path.absolute()


def _weights(backbone: Backbone) -> dict[str, object]:
    """Absolute paths of the backbone's existing files and folders, by key, without names of models and tags."""
    paths: dict[str, object] = {}
    name, pretrained, text_encoder = backbone.name, backbone.pretrained, backbone.text_encoder
    # A tag contains neither dot nor slash, and has precedence over a file of the same name.
    if pretrained and re.search(r"[./]", pretrained) and is_file(Path(pretrained)):
        paths["pretrained"] = str(Path(pretrained).absolute())
        # Only with weights: random weights are drawn from the model's name as written.
        if name.endswith(".json") and is_file(Path(name)):
            paths["name"] = str(Path(name).absolute())
    if text_encoder is not None and text_encoder.exists():
        paths["text_encoder"] = text_encoder.absolute()
    return paths
