"""Reads and writes YAML 1.2 with ruamel.yaml, which refuses duplicate keys; bounds what a file may expand to.

By YAML 1.2 ``010`` is the number 10, and ``on`` and ``1:30`` are texts. Dates are texts here, too.
"""

from __future__ import annotations

import io
import stat
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from fedmq.errors import InputError, line_of

#: Maximum size of a file [bytes].
MAX_BYTES = 1 << 18
#: Maximum number of values after each alias has been replaced by what it stands for.
MAX_NODES = 100_000
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


def line_at(path: Path, location: tuple[str | int, ...]) -> int | None:
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


def dump(value: object) -> str:
    """YAML text of a value; keys keep their order."""
    yaml, text = _yaml(), io.StringIO()
    yaml.default_flow_style = False
    yaml.representer.sort_base_mapping_type_on_output = False
    yaml.dump(value, text)
    return text.getvalue()


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
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        # A bracket or quotation mark that is not closed is noticed only in a later line.
        begun = error.context_mark.line + 1 if error.context_mark and "block" not in (error.context or "") else line
        problem = error.problem or "not YAML"
        where, what = (begun, f"{problem} in line {line}") if begun < line else (line, problem)
        raise InputError(f"{path}: line {where}", what, "valid YAML") from None
    except RecursionError:
        raise InputError(str(path), "brackets or indentation nested too deeply", "valid YAML") from None
    except ERRORS as error:
        raise InputError(str(path), str(error).splitlines()[0], "valid YAML") from None
    if not isinstance(loaded, dict):
        raise InputError(str(path), type(loaded).__name__, "a mapping of scenario keys")
    return loaded
