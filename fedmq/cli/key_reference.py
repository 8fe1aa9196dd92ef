"""Reference of scenario keys, derived from the code: name, values, default and meaning."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import docstring_parser
from pydantic import BaseModel, TypeAdapter

from fedmq.config.faults import FAULTS
from fedmq.config.scenario import Objective, ProtocolChoice, Scenario
from fedmq.config.sections import Part
from fedmq.models.objective_registry import CommonSpacePlan, ObjectiveKind

#: Stands in for the default of a key that must be given.
REQUIRED = "required"
_TYPES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true, false", "null": "null"}
_BOUNDS = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}"}
#: Larger upper bounds only prevent overflow and are not shown.
_VAST = 10**9


@dataclass(frozen=True)
class Key:
    """A scenario key or an option."""

    name: str
    values: str  # allowed values, in words
    default: str  # the default in YAML, or :data:`REQUIRED`
    meaning: str  # description


def options(schema: type[Any]) -> tuple[Key, ...]:
    """The options of a method or base loss, described by its dataclass's docstring."""
    meanings: dict[str, str] = {}
    for kind in reversed([kind for kind in inspect.getmro(schema) if dataclasses.is_dataclass(kind)]):
        docstring = docstring_parser.parse(inspect.cleandoc(kind.__doc__ or ""), docstring_parser.DocstringStyle.GOOGLE)
        meanings |= {parameter.arg_name: _plain(parameter.description or "") for parameter in docstring.params}
    for name, values in getattr(schema, "PRESETS", {}).items():
        listed = ", ".join(f"{key}: {_written(value)}" for key, value in values.items())
        sets = f"`{listed}`" if listed else "the defaults"
        meanings["preset"] = f"{meanings.get('preset', '')} `{name}`: {sets}."
    hints = get_type_hints(schema, include_extras=True)
    return tuple(
        Key(
            field.name,
            _values(TypeAdapter(hints[field.name]).json_schema()),
            _written(field.default),
            meanings.get(field.name, ""),
        )
        for field in dataclasses.fields(schema)
    )


def loss(kind: ObjectiveKind) -> tuple[Key, ...]:
    """Keys of a base loss: the sizes of its network, if it has a separate one, then its options."""
    keys, plan = options(kind.options), kind.network(kind.options())
    if plan is None:
        return keys
    if isinstance(plan, CommonSpacePlan):
        code, hidden, image = "width of the common space.", str(plan.hidden), True
    else:
        code, hidden, image = "code length.", ", ".join(map(str, plan.text)), bool(plan.image)
    before = "width of the layer before it" + ("." if image else ", which only the text tower has.")
    return Key("bits", "integer ≥ 1", str(plan.bits), code), Key("hidden", "integer ≥ 1", hidden, before), *keys


def parts() -> dict[str, tuple[str, tuple[Key, ...]]]:
    """Sections of a scenario by title: the purpose, and keys with full names such as ``training.betas``."""
    top, sections = [], dict[str, tuple[str, tuple[Key, ...]]]()
    for name, field in Scenario.model_fields.items():
        below = _part(field.annotation)
        if below is None or name == "faults":
            top.append(_key(Scenario, name, ""))
        else:
            sections[name] = _purpose(below), tuple(_flat(below, f"{name}."))
    return {"": (_purpose(Scenario), tuple(top)), **sections}


def faults() -> dict[str, tuple[str, tuple[Key, ...]]]:
    """Faults by ``kind``: description and keys."""
    return {
        kind: (_purpose(fault), tuple(_key(fault, name, "") for name in fault.model_fields if name != "kind"))
        for kind, fault in FAULTS.items()
    }


def _purpose(kind: type[Any]) -> str:
    """First paragraph of a class's docstring, without Sphinx roles."""
    return _plain(inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0])


def _plain(text: str) -> str:
    """A docstring's text on one line, with names as Markdown code."""
    return " ".join(re.sub(r":(?:mod|class|func|meth|data):`~?([^`]*)`", r"`\1`", text).replace("``", "`").split())


def _part(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, possibly optional; None if it holds a value, a list or a mapping."""
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    if get_origin(annotation) in (dict, tuple, list):
        return None
    return next((kind for kind in kinds if issubclass(kind, Part | ProtocolChoice | Objective)), None)


def _flat(model: type[BaseModel], prefix: str) -> Iterator[Key]:
    """All keys below a section; keys of a mapping, such as device classes, are listed under ``NAME``."""
    for name, field in model.model_fields.items():
        below = _part(field.annotation)
        if below is not None:
            yield from _flat(below, f"{prefix}{name}.")
            continue
        yield _key(model, name, prefix)
        if get_origin(field.annotation) is dict:
            for inner in get_args(field.annotation)[1:]:
                if (section := _part(inner)) is not None:
                    yield from _flat(section, f"{prefix}{name}.NAME.")


def _key(model: type[BaseModel], name: str, prefix: str) -> Key:
    field = model.model_fields[name]
    schema = model.model_json_schema()
    default = REQUIRED if field.is_required() else _written(field.get_default(call_default_factory=True))
    values = _values(schema["properties"][name], schema.get("$defs", {}))
    return Key(prefix + name, values, default, field.description or "")


def _written(value: Any) -> str:
    """A default as written in a scenario."""
    if isinstance(value, Path):
        return str(value)
    return json.dumps(list(value) if isinstance(value, tuple | frozenset) else value, ensure_ascii=False).strip('"')


def _values(schema: Mapping[str, Any], defs: Mapping[str, Any] | None = None) -> str:
    """Values that a JSON schema allows, in words."""
    defs = defs or {}
    if "$ref" in schema:
        return _values(defs[schema["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in schema or "oneOf" in schema:
        return " or ".join(dict.fromkeys(_values(option, defs) for option in schema.get("anyOf") or schema["oneOf"]))
    if "const" in schema:
        return _written(schema["const"])
    if "enum" in schema:
        return ", ".join(map(_written, schema["enum"]))
    match schema.get("type"):
        case "array" if "prefixItems" in schema:
            return "[" + ", ".join(_values(item, defs) for item in schema["prefixItems"]) + "]"
        case "array":
            return f"list of {_values(schema.get('items', {}), defs)}"
        case "object" if "properties" in schema:
            return "mapping"
        case "object":
            kinds: list[Any] = [schema.get("additionalProperties"), *schema.get("patternProperties", {}).values(), {}]
            return f"mapping of name to {_values(next(kind for kind in kinds if isinstance(kind, dict)), defs)}"
        case "string" if schema.get("format") == "path":
            return "path"
        case kind:
            limits = {bound: schema[bound] for bound in _BOUNDS if bound in schema and schema[bound] < _VAST}
            if "exclusiveMinimum" in limits:
                limits.pop("minimum", None)
            bounds = [_BOUNDS[bound].format(f"{value:g}") for bound, value in limits.items()]
            return " ".join([_TYPES.get(str(kind), "anything"), " and ".join(bounds)]).strip()
