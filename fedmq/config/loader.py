"""Reading a scenario's YAML file: settings over it, validation, and errors of one line that name file, line and key."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from fedmq.config.faults import FAULTS
from fedmq.config.scenario import Backbone, Scenario
from fedmq.errors import InputError, line_of
from fedmq.text import did_you_mean, one_of


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
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: line {line_of(error)}", error.reason, "UTF-8") from None
    except OSError as error:
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


class Overridden(dict[str, object]):
    """A raw scenario that knows which of its keys were set over the file's, for errors to name the right place.

    Args:
        values: of the raw scenario.
        keys: as ``--set`` names them, the last one last.
    """

    def __init__(self, values: Mapping[str, object], keys: Sequence[str]) -> None:
        super().__init__(values)
        self.overridden = tuple(keys)


def apply_settings(raw: Mapping[str, object], settings: Sequence[str]) -> Overridden:
    """Apply ``key.sub=value`` settings (``--set``) to a raw scenario; values are read as YAML.

    Of one key the last setting counts. One of a whole key, such as ``protocol``, goes before those below it, such as
    ``protocol.mu``, whichever was written first, so that it does not wipe them.

    Raises:
        InputError: a setting is not ``key=value``, or goes below something that is no mapping.
    """
    result: dict[str, object] = {**raw}
    keys = [*(raw.overridden if isinstance(raw, Overridden) else ())]
    for key, value in _in_order([_read_setting(setting) for setting in settings]):
        place = result
        *parents, leaf = key.split(".")
        for parent in parents:
            below = _long_form(parent, place.get(parent)) if place is result else place.get(parent)
            if below is not None and not isinstance(below, dict):
                raise InputError(f"--set {key}", value, f"no key below {parent}, which holds none")
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
        value = yaml.safe_load(text)
        json.dumps(value, default=str, skipkeys=True)  # an alias may hold itself
    except (yaml.YAMLError, ValueError, RecursionError):
        raise InputError(f"--set {key}", text[:60], "a YAML value") from None
    return key, _long_form(key, value)


def _long_form(key: str, value: object) -> object:
    """A mapping in place of the short form that some keys of a scenario have."""
    if isinstance(value, str) and key in ("protocol", "objective"):
        return {"name" if key == "protocol" else "base": value}
    if isinstance(value, int | float) and not isinstance(value, bool) and key == "participation":
        return {"rate": value}
    return value


def _in_order(settings: Sequence[tuple[str, object]]) -> list[tuple[str, object]]:
    """Settings as they are applied: a whole key before what is below it.

    What is below falls away where a later setting of the whole key holds that place itself.
    """
    kept = [
        (key, value)
        for number, (key, value) in enumerate(settings, 1)
        if not any(
            key.startswith(f"{whole}.") and _holds(own, key[len(whole) + 1 :]) for whole, own in settings[number:]
        )
    ]
    return sorted(kept, key=lambda setting: setting[0].count("."))


def _holds(value: object, key: str) -> bool:
    """Whether a value has a place of its own for a key below it; one that is no mapping leaves no room for any."""
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return True
        if part not in value:
            return False
        value = value[part]
    return True


def _line_of(path: Path, location: Sequence[str | int]) -> int | None:
    """The line of a key in a YAML file, or None (key came from --set or from a default)."""
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return None
    line = None
    for part in location:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
            continue
        if not isinstance(node, yaml.MappingNode):
            break
        match = [(key, value) for key, value in node.value if key.value == str(part)]
        if not match:
            break
        line, node = match[0][0].start_mark.line + 1, match[0][1]
    return line


def _as_written(location: Sequence[str | int]) -> list[str | int]:
    """A place as the file has it: pydantic's also name the kind of a union behind an index, and types tried."""
    kept: list[str | int] = []
    for before, part in zip([None, *location], location, strict=False):
        of_kind = isinstance(before, int) and part in FAULTS
        if not (of_kind or part in _TRIED or re.search(r"[\[(]", str(part))):
            kept.append(part)
    return kept


#: What pydantic calls a key that it does not know.
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
#: Types that it names where a value may be of several.
_TRIED = ("str", "int", "float", "bool")


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


def place_of(path: Path, location: Sequence[str | int], settings: Sequence[str] = ()) -> str:
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
    # A key that is misspelt is also missed: what stands there helps more than what does not.
    errors = sorted(error.errors(), key=lambda each: each["type"] not in _UNKNOWN)
    first = errors[0]
    location = [*prefix, *_as_written(first["loc"])]
    where = place_of(path, location, settings)
    # Of a value that may be one thing or another each is told.
    tried = [each for each in errors if _as_written(each["loc"]) == _as_written(first["loc"])]
    told = [each["msg"].removeprefix("Value error, ") for each in tried]
    message = " or ".join(dict.fromkeys([told[0], *(each.removeprefix("Input should be ") for each in told[1:])]))
    message = message.replace("a valid tuple", "a list").replace("a valid string", "text")
    if first["type"] == "missing":
        found: object = "nothing"
        message = "a value is required here"
    elif first["type"] in _UNKNOWN:
        found, message = str(location[-1]), "a known key"
        if model is not None:
            keys = _keys_at(model, first["loc"][:-1])
            message += f"; {hint}" if (hint := did_you_mean(found, keys)) else f": {', '.join(keys)}"
    elif first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        # Pydantic names the discriminator in quotes.
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
    return InputError(where, found, message[0].lower() + message[1:])


def parse(raw: Mapping[str, object], path: Path) -> Scenario:
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
        raise InputError(place_of(path, location, settings), value, "a number; true and false are none")
    return scenario


def _truths_for_numbers(
    raw: object, made: object, above: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], bool]]:
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


def with_absolute_paths(scenario: Scenario, *, weights: bool) -> Scenario:
    """A scenario that finds its files from any folder. Links are left: what belongs to a file lies beside its link.

    Args:
        scenario: as read; relative paths start at the working directory.
        weights: also the backbone's files and folders that are there.

    Raises:
        InputError: something is no path.
    """
    data, trace = scenario.data, scenario.participation.trace
    places = {key: getattr(data, key) for key in ("path", "annotations", "images")}
    parts = {
        "data": {key: _absolute(f"data.{key}", path) for key, path in places.items() if path},
        "participation": {"trace": _absolute("participation.trace", trace)} if trace else {},
        "backbone": _weights(scenario.backbone) if weights else {},
    }
    return scenario.model_copy(
        update={part: getattr(scenario, part).model_copy(update=changed) for part, changed in parts.items()}
    )


def _absolute(key: str, path: Path) -> Path:
    try:
        path = path.expanduser()
        path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a character no path has
        raise InputError(key, str(path)[:200], f"a path ({error})") from None
    return path.absolute()


def _weights(backbone: Backbone) -> dict[str, object]:
    """The backbone's files and folders that are there, absolute. Names of models and tags are left alone."""
    found: dict[str, object] = {}
    name, pretrained, text_encoder = backbone.name, backbone.pretrained, backbone.text_encoder
    # A tag has neither dot nor slash, and comes before a file that is called like it.
    if pretrained and re.search(r"[./]", pretrained) and Path(pretrained).is_file():
        found["pretrained"] = str(Path(pretrained).absolute())
        # Random weights would be others: they are drawn by the model's name as it is written.
        if name.endswith(".json") and Path(name).is_file():
            found["name"] = str(Path(name).absolute())
    if text_encoder is not None and text_encoder.exists():
        found["text_encoder"] = text_encoder.absolute()
    return found
