"""YAML files of the user: read with bounds, written, and refused with the file, line and key of what is wrong.

ruamel.yaml reads YAML 1.2 and refuses duplicate keys: ``010`` is the number 10, and ``on`` and ``1:30`` are texts.
Dates are texts here, too.
"""

from __future__ import annotations

import copy
import functools
import io
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from fedmq.errors import ConflictError, InputError, line_of
from fedmq.storage.json_files import Problem
from fedmq.text import did_you_mean, first_few

M = TypeVar("M", bound=BaseModel)
#: Maximum size of a file [bytes].
MAX_BYTES = 1 << 18
#: Maximum number of values after each alias has been replaced by what it stands for.
MAX_NODES = 100_000
#: Keys and indices that lead to a value.
Location = Sequence[str | int]
#: Number of further unknown keys that one message lists.
LISTED = 10
#: Pydantic's error types of unknown keys.
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
#: What a text that is not YAML, or has a number of thousands of digits, or is nested too deeply raises.
ERRORS = (YAMLError, ValueError, RecursionError)


class _Constructor(SafeConstructor):
    """Makes plain values: texts also of what YAML 1.1 had types for."""

    def construct_text(self, node: ScalarNode) -> str:
        """A text; the two escapes that JSON writes for a character beyond U+FFFF are one character."""
        try:
            return str(self.construct_scalar(node)).encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            problem = "half of a UTF-16 character, which is not text"
            raise ConstructorError(None, None, problem, node.start_mark) from None


for _name in ("str", "timestamp", "value"):
    _Constructor.add_constructor(f"tag:yaml.org,2002:{_name}", _Constructor.construct_text)


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    yaml.composer.warn_double_anchors = False
    return yaml


def parse(text: str) -> Any:
    """The value of one YAML document; raises one of :data:`ERRORS`."""
    return copy.deepcopy(_parsed(text))


@functools.lru_cache(maxsize=128)
def _parsed(text: str) -> Any:
    """The value of a document, kept: an audit reads a scenario three times, a comparison every setting for each row."""
    yaml = _yaml()
    root = yaml.compose(text)
    if root is None:
        return None
    _check_size(root)
    try:
        return yaml.constructor.construct_document(root)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise YAMLError(f"a value that its tag does not fit ({error})") from None


def _check_size(root: Node) -> None:
    """Refuse aliases that contain themselves, or that stand for more than :data:`MAX_NODES` values in all."""
    sizes: dict[int, int | None] = {}

    def size(node: Node) -> int:
        known = sizes.setdefault(id(node), None)
        if known is not None:
            return known
        children: list[Node] = []
        if isinstance(node, MappingNode):
            children = [child for pair in node.value for child in pair]
        elif isinstance(node, SequenceNode):
            children = node.value
        if any(sizes.get(id(child), 0) is None for child in children):
            raise ConstructorError(None, None, "an alias that contains itself", node.start_mark)
        total = 1 + sum(map(size, children))
        if total > MAX_NODES:
            problem = f"aliases that stand for more than {MAX_NODES:,} values"
            raise ConstructorError(None, None, problem, node.start_mark)
        sizes[id(node)] = total
        return total

    size(root)


def dump(value: object) -> str:
    """YAML text of a value; keys keep their order."""
    yaml, text = _yaml(), io.StringIO()
    yaml.default_flow_style = False
    yaml.representer.sort_base_mapping_type_on_output = False
    yaml.dump(value, text)
    return text.getvalue()


def read_yaml(path: Path, kind: str = "a scenario") -> dict[str, Any]:
    """Read a YAML mapping; an error names the kind of file that is expected.

    Raises:
        InputError: the file is missing, unreadable, too large, not YAML, or not a mapping.
    """
    try:
        about = path.stat()
        # Reading or even opening a pipe or device may block forever.
        if not (stat.S_ISREG(about.st_mode) or path.is_dir()):
            raise InputError(str(path), "no regular file", f"{kind} file (YAML)")
        if about.st_size > MAX_BYTES:
            raise InputError(str(path), f"{about.st_size:,} bytes", f"a YAML file of at most {MAX_BYTES:,} bytes")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(str(path), "no such file", f"{kind} file (YAML)") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: line {line_of(error)}", "bytes that are not UTF-8", "UTF-8 text") from None
    except (OSError, ValueError) as error:
        raise InputError(str(path), str(error), "a readable UTF-8 file") from None
    try:
        loaded = parse(text)
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        # A bracket or quotation mark that is not closed is noticed only in a later line.
        context = error.context_mark if error.context and not re.search("block|construct", error.context) else None
        begun = line if context is None else context.line + 1
        problem = error.problem or "not YAML"
        where, what = (begun, f"{problem} in line {line}") if begun < line else (line, problem)
        raise InputError(f"{path}: line {where}", what, "valid YAML") from None
    except RecursionError:
        raise InputError(str(path), "brackets or indentation nested too deeply", "valid YAML") from None
    except ERRORS as error:
        raise InputError(str(path), str(error).splitlines()[0], "valid YAML") from None
    if not isinstance(loaded, dict):
        raise InputError(str(path), type(loaded).__name__, f"the keys of {kind} file, each with its value")
    return loaded


# ------------------------------------------------------------------------------------------------------------- errors
def _line_at(path: Path, location: Location) -> int | None:
    """Line of a key or item in a file; of the last one above it that the file has, None if there is none."""
    try:
        node, line = _yaml().compose(path.read_text(encoding="utf-8")), None
    except (OSError, *ERRORS):
        return None
    for part in location:
        if isinstance(node, SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        elif isinstance(node, MappingNode):
            pair = next((pair for pair in node.value if pair[0].value == str(part)), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
    return line


def place_of(path: Path, location: Location, settings: Sequence[str] = ()) -> str:
    """File, line and key of a location; the setting instead of the line if the key was overridden."""
    key = ".".join(map(str, location))
    setting = max((name for name in settings if f"{key}.".startswith(f"{name}.")), key=len, default=None)
    if setting is not None:
        return f"{path}: --set {setting}" + (f": {key}" if setting != key else "")
    line = _line_at(path, location)
    return f"{path}" + (f": line {line}" if line else "") + (f": {key}" if key else "")


def validated(model: type[M], raw: object, path: Path, settings: Sequence[str] = ()) -> M:
    """A file's content as the model that describes it.

    Raises:
        InputError: the first error that pydantic found, as one line with file, line and key, or the setting.
    """
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise _input_error(error, path, raw, model, settings) from None


def _input_error(
    error: ValidationError, path: Path, raw: object, model: type[BaseModel], settings: Sequence[str]
) -> InputError:
    # A misspelt key causes two errors, unknown and missing: the unknown key helps more.
    errors = sorted(error.errors(include_url=False), key=lambda details: details["type"] not in _UNKNOWN)
    located = [(_as_written(details, raw), details) for details in errors]
    location, first = located[0]
    conflict = first.get("ctx", {}).get("error")
    place = place_of(path, conflict.key.split(".") if isinstance(conflict, ConflictError) else location, settings)
    if first["type"] in _UNKNOWN:
        key, keys = str(first["loc"][-1]), _keys_at(model, first["loc"][:-1])
        unknown = dict.fromkeys(where for where, details in located if details["type"] in _UNKNOWN)
        others = [place_of(path, where, settings).removeprefix(f"{path}: ") for where in unknown if where != location]
        also = f"; unknown as well: {first_few(others, LISTED)}" if others else ""
        return InputError(place, key[:80], f"a known key; {did_you_mean(key, keys) or ', '.join(keys)}{also}")
    # A union has an error for each type that it allows.
    tried = [Problem.of(details) for where, details in located if where == location]
    return InputError(place, tried[0].value, " or ".join(dict.fromkeys(problem.allowed for problem in tried)))


def _as_written(details: ErrorDetails, raw: Any) -> tuple[str | int, ...]:
    """An error's location as in the file; pydantic's also contain the kinds of unions and the types it tried."""
    location: list[str | int] = []
    for part in details["loc"]:
        try:
            raw = raw[part]
        except (LookupError, TypeError):
            continue
        location.append(part)
    return (*location, details["loc"][-1]) if details["type"] == "missing" else tuple(location)


def _keys_at(model: type[BaseModel], location: Location) -> list[str]:
    """Known keys at a location in a model; the location may contain indices and kinds of a union."""
    models = [model]
    for part in location:
        fields = [known.model_fields[part] for known in models if part in known.model_fields]
        of_kind = [
            known
            for known in models
            if any(part in get_args(field.annotation) for field in known.model_fields.values())
        ]
        models = [below for field in fields for below in _models(field.annotation)] or of_kind or models
    return list(dict.fromkeys(field.alias or name for known in models for name, field in known.model_fields.items()))


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in a type annotation, including those of unions, lists and mappings."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)
