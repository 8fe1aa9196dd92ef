"""Reads and writes YAML by the core schema of YAML 1.2, with bounds against files that expand when they are read.

PyYAML follows YAML 1.1, in which ``010`` is 8, ``1:30`` is 90 and ``on`` is true. Here, as in YAML 1.2, they are the
number 10 and two texts.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from fedmq.errors import InputError, line_of

#: Maximum size of a file [bytes].
MAX_BYTES = 1 << 18
#: Maximum number of values after each alias has been replaced by what it stands for.
MAX_NODES = 100_000

_BOOL, _INT, _FLOAT, _NULL, _MERGE = (f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float", "null", "merge"))
#: Plain scalars of the core schema (YAML 1.2.2, section 10.3.2), each with the characters that they can start with.
_CORE = {
    _BOOL: (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    _INT: (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    _FLOAT: (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    _NULL: (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    _MERGE: (r"<<", "<"),
}
_PATTERNS = {tag: re.compile(f"(?:{pattern})\\Z") for tag, (pattern, _) in _CORE.items()}


class _Loader(yaml.SafeLoader):
    """Reads the core schema; refuses duplicate keys, of which the last would silently win, and aliases that explode."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own attribute, filled below

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            _check_size(node)
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or 1.2 would read as something else."""


for _tag, (_, _first) in _CORE.items():
    _Loader.add_implicit_resolver(_tag, _PATTERNS[_tag], list(_first))
    _Dumper.add_implicit_resolver(_tag, _PATTERNS[_tag], list(_first))


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    if not _PATTERNS[_INT].match(text):  # an explicit tag, such as !!int on
        raise yaml.constructor.ConstructorError(None, None, f"{text[:40]!r} is not a whole number", node.start_mark)
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _float(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node))
    if not _PATTERNS[_FLOAT].match(text):
        raise yaml.constructor.ConstructorError(None, None, f"{text[:40]!r} is not a number", node.start_mark)
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


def _bool(loader: _Loader, node: yaml.ScalarNode) -> bool:
    text = str(loader.construct_scalar(node))
    if not _PATTERNS[_BOOL].match(text):
        raise yaml.constructor.ConstructorError(None, None, f"{text[:40]!r} is not true or false", node.start_mark)
    return text.lower() == "true"


def _str(loader: _Loader, node: yaml.ScalarNode) -> str:
    text = str(loader.construct_scalar(node))
    if not any("\ud800" <= each <= "\udfff" for each in text):
        return text
    try:  # JSON writes a character beyond U+FFFF as two escapes
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        what = "half of a UTF-16 character, which is not text"
        raise yaml.constructor.ConstructorError(None, None, what, node.start_mark) from None


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == _MERGE:
            continue  # construct_mapping replaces it by the keys of its value
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            what = "a mapping or list as a key; quote text that contains braces"
            raise yaml.constructor.ConstructorError(None, None, what, key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(_INT, _int)
_Loader.add_constructor(_FLOAT, _float)
_Loader.add_constructor(_BOOL, _bool)
_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG, _str)
_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _check_size(root: yaml.Node) -> None:
    """Refuse aliases that contain themselves, or that stand for more than :data:`MAX_NODES` values in all.

    Raises:
        yaml.constructor.ConstructorError: with the place of the first such alias' anchor.
    """
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: yaml.Node) -> int:
        if id(node) in sizes:
            return sizes[id(node)]
        if id(node) in open_nodes:
            raise yaml.constructor.ConstructorError(None, None, "an alias that contains itself", node.start_mark)
        open_nodes.add(id(node))
        total = 1
        if isinstance(node, yaml.MappingNode):
            total += sum(size(key) + size(value) for key, value in node.value)
        elif isinstance(node, yaml.SequenceNode):
            total += sum(size(each) for each in node.value)
        open_nodes.remove(id(node))
        if total > MAX_NODES:
            what = f"aliases that stand for more than {MAX_NODES:,} values"
            raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)
        sizes[id(node)] = total
        return total

    size(root)


def parse(text: str) -> Any:
    """The value of one YAML document.

    Raises:
        yaml.YAMLError: it is not valid YAML, or it expands beyond :data:`MAX_NODES` values.
        ValueError: it holds a number of too many digits.
        RecursionError: it is nested too deeply.
    """
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader subclass


def compose(text: str) -> yaml.Node | None:
    """The nodes of one YAML document, which know their lines; raises as :func:`parse`."""
    return yaml.compose(text, Loader=_Loader)


def dump(value: object) -> str:
    """YAML text of a value, which readers of YAML 1.1 and 1.2 both understand; keys keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping.

    Raises:
        InputError: the file is missing, unreadable, too large, not YAML, or not a mapping.
    """
    try:
        about = path.stat()
        # Reading or even opening a pipe or device may block forever.
        if not (stat.S_ISREG(about.st_mode) or path.is_dir()):
            raise InputError(str(path), "no regular file", "a scenario file (YAML)")
        if about.st_size > MAX_BYTES:
            raise InputError(str(path), f"{about.st_size:,} bytes", f"a YAML file of at most {MAX_BYTES:,} bytes")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(str(path), "no such file", "a scenario file (YAML)") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: line {line_of(error)}", "bytes that are not UTF-8", "UTF-8 text") from None
    except (OSError, ValueError) as error:
        raise InputError(str(path), str(error), "a readable UTF-8 file") from None
    try:
        loaded = parse(text)
    except yaml.MarkedYAMLError as error:
        line, problem = error.problem_mark.line + 1 if error.problem_mark else 1, error.problem or "not YAML"
        # A bracket or quotation mark that is not closed, or a missing colon, is noticed only in a later line.
        begun = error.context_mark.line + 1 if error.context_mark else line
        if begun < line and "block" not in (error.context or ""):
            raise InputError(f"{path}: line {begun}", f"{problem} in line {line}", "valid YAML") from None
        raise InputError(f"{path}: line {line}", problem, "valid YAML") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number of thousands of digits
        raise InputError(str(path), str(error).splitlines()[0], "valid YAML") from None
    except RecursionError:
        raise InputError(str(path), "brackets or indentation nested too deeply", "valid YAML") from None
    if not isinstance(loaded, dict):
        raise InputError(str(path), type(loaded).__name__, "a mapping of scenario keys")
    return loaded
