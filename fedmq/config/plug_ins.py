"""The plug-ins that a scenario selects by name, methods, objectives, data sets and metrics, and their options.

A plug-in is built in, an entry point of an installed package, or a Python file of the user. Built-in names take
precedence over entry points of the same name.

A scenario names a file of the user as ``./mine.py``. When the user starts the scenario, :func:`adopt` copies the file
into the cache under its SHA-256 and returns its *reference*, ``mine.py@<SHA-256>``, which replaces the path in the
resolved scenario. Thus the run's id depends on the file's content but not its path, every process of the run executes
the same code, and a run can be replayed after the file was edited.

Only :func:`load` executes such a file, by its reference and from the cache. The scenario in a run folder from another
user may contain any reference, so files that were not adopted on this machine are refused. Anyone who can write to the
cache folder can execute code: do not share it with people you do not trust.

Options of methods and objectives have a frozen dataclass as their schema.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import hashlib
import importlib
import importlib.util
import os
import pkgutil
import re
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, cast, get_type_hints

from pydantic import TypeAdapter, ValidationError

from fedmq.errors import InputError, RunError
from fedmq.packages import full_name
from fedmq.storage.cache import cache_folder
from fedmq.storage.json_files import Problem
from fedmq.storage.regular_files import read_regular
from fedmq.storage.run_folder import write_bytes
from fedmq.text import did_you_mean, one_of

T = TypeVar("T")


def names_found(package: str, group: str) -> tuple[str, ...]:
    """Names of the plug-ins of a kind, found without importing any, as that may load torch.

    Those of the entry point group, and the modules of the package, except those with a leading underscore.
    """
    top, *inner = full_name(package).split(".")
    spec = importlib.util.find_spec(top)
    places = () if spec is None else spec.submodule_search_locations or ()
    return _with_installed(sorted(_modules_in([str(Path(place, *inner)) for place in places])), group)


def unknown(key: str, name: str, names: Collection[str]) -> InputError:
    """The error of a name that is not a plug-in's."""
    return InputError(key, name, f"{one_of(name, names)}, or the path of your own Python file, ./mine.py")


def _modules_in(places: Iterable[str]) -> list[str]:
    return [
        module.name for module in pkgutil.iter_modules(places) if not module.ispkg and not module.name.startswith("_")
    ]


def _with_installed(built_in: Sequence[str], group: str) -> tuple[str, ...]:
    """The built-in names, then those of installed packages."""
    return (*built_in, *sorted(point.name for point in entry_points(group=group) if point.name not in built_in))


class Registry(Generic[T]):
    """The plug-ins of one kind by name.

    Args:
        key: scenario key that selects a plug-in, e.g. ``protocol.name``.
        group: entry point group of installed packages; an entry point names a module.
        attribute: attribute of a module or user file that is the plug-in, e.g. ``PROTOCOL``.
        check: returns what is wrong with an object that is not such a plug-in; None if nothing is.
        expected: description of a plug-in, for errors.
        built_in: built-in plug-ins that are not modules.
    """

    def __init__(
        self,
        key: str,
        group: str,
        attribute: str,
        check: Callable[[object], str | None],
        expected: str,
        built_in: Mapping[str, T] | None = None,
    ) -> None:
        self.key, self.group, self.attribute = key, group, attribute
        self._check, self._expected = check, expected
        self._built_in: Mapping[str, T] = {} if built_in is None else built_in
        self._packages: list[str] = []
        self._module_packages: dict[str, str] = {}

    def add_package(self, package: str) -> None:
        """Add the modules of a package as built-in plug-ins, except those with a leading underscore."""
        if package not in self._packages:
            self._packages.append(package)
            self._module_packages = {}

    def built_in(self) -> tuple[str, ...]:
        """The built-in names; those of modules sorted."""
        return (*self._built_in, *sorted(self._modules()))

    def names(self) -> tuple[str, ...]:
        """The built-in names, then those of installed packages."""
        return _with_installed(self.built_in(), self.group)

    def module(self, name: str) -> ModuleType | None:
        """The module of a plug-in; None for a built-in one without a separate module.

        Raises:
            InputError: the name is unknown, or its module cannot be imported.
        """
        if is_reference(name):
            return load(name)
        if name in self._built_in:
            return None
        if (package := self._modules().get(name)) is not None:
            return importlib.import_module(f"{package}.{name}")
        for point in entry_points(group=self.group, name=name):
            try:
                loaded = point.load()
            except Exception as error:
                raise UserFileError(self._place(name), f"{type(error).__name__}: {error}", point.value) from error
            if isinstance(loaded, ModuleType):
                return loaded
            raise UserFileError(self._place(name), point.value, f"a module that defines {self.attribute}")
        raise unknown(self.key, name, self.names())

    def find(self, name: str) -> T:
        """The plug-in of a name: built in, of an entry point, or a reference to a user's file, ``mine.py@<SHA-256>``.

        Raises:
            InputError: the name is unknown.
            UserFileError: a user's file or a package's module does not define such a plug-in.
        """
        module = self.module(name)
        if module is None:
            return self._built_in[name]
        if not hasattr(module, self.attribute):
            place = self._place(name)
            raise UserFileError(place, f"no {self.attribute}", f"{self.attribute} = ..., {self._expected}")
        plug_in = getattr(module, self.attribute)
        if (wrong := self._check(plug_in)) is not None:
            raise UserFileError(f"{self._place(name)}: {self.attribute}", wrong, self._expected)
        return cast(T, plug_in)

    def _place(self, name: str) -> str:
        return label(name) if is_reference(name) else f"entry point {self.group}: {name}"

    def _modules(self) -> dict[str, str]:
        """Names of the built-in modules, with their packages."""
        if not self._module_packages:
            self._module_packages = {
                name: package
                for package in self._packages
                for name in _modules_in(importlib.import_module(package).__path__)
            }
        return self._module_packages


_FILE = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.py"
_REFERENCE = re.compile(rf"(?P<file>{_FILE})@(?P<digest>[0-9a-f]{{64}})")
#: Maximum size of a file [bytes].
_MOST_BYTES = 1 << 22
#: Prevents two threads from executing a file twice, which would create two versions of its classes.
_LOCK = threading.RLock()
#: Variable of an executed file with its name, for :func:`place_of_error`.
_NAME = "__fedmq_user_file__"


class UserFileError(InputError):
    """A user's Python file cannot be used; the place is the file, with the line if known."""


def is_path(name: str) -> bool:
    """Whether a name in a scenario is the path of a Python file, e.g. ``./mine.py``."""
    return name.endswith(".py")


def is_reference(name: str) -> bool:
    """Whether a name in a scenario is a reference to an adopted file, ``mine.py@<SHA-256>``."""
    return _REFERENCE.fullmatch(name) is not None


def label(name: str) -> str:
    """A name for display: the file's name of a reference, otherwise the name itself."""
    match = _REFERENCE.fullmatch(name)
    return match["file"] if match else name


def titled(name: str) -> str:
    """A name for a title: a reference with the first 12 digits of its digest, otherwise the name itself."""
    match = _REFERENCE.fullmatch(name)
    return name[: len(match["file"]) + 13] if match else name


def adopt(path: Path) -> str:
    """Copy a user's file into the cache, so that processes on this machine may execute it, and return its reference.

    It is compiled but not executed.

    Raises:
        UserFileError: the file does not exist, its name is not allowed, or it has a syntax error.
        RunError: the cache cannot be written.
    """
    if not re.fullmatch(_FILE, path.name):
        raise UserFileError(str(path), path.name, "a file name of letters, digits, '_', '-' and '.' that ends in .py")
    if not os.path.lexists(path):
        raise UserFileError(str(path), "no such file", "a Python file; paths are relative to the scenario's folder")
    try:
        source = read_regular(path, "a readable Python file", _MOST_BYTES)
    except InputError as error:
        raise UserFileError(error.place, error.found, error.allowed) from None
    try:
        compile(source, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        place = f"{path}: line {error.lineno}" if error.lineno else str(path)
        raise UserFileError(place, error.msg, "valid Python") from None
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:  # a null byte, or what nests too deeply
        raise UserFileError(str(path), str(error) or type(error).__name__, "valid Python") from None
    digest = hashlib.sha256(source).hexdigest()
    kept = _copy(digest)
    try:
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(kept, source)
    except OSError as error:
        raise RunError(f"cache {kept.parent} cannot be written: {error.strerror or error}") from error
    return f"{path.name}@{digest}"


def _copy(digest: str) -> Path:
    return cache_folder() / "code" / f"{digest}.py"


@functools.cache
def _executed(reference: str) -> ModuleType:
    match = _REFERENCE.fullmatch(reference)
    assert match is not None  # noqa: S101 - checked by the caller
    file, digest = match["file"], match["digest"]
    path = _copy(digest)
    try:
        source = path.read_bytes()
    except OSError:
        source = b""
    if hashlib.sha256(source).hexdigest() != digest:
        allowed = "a file adopted on this machine; if you trust it, adopt it with fedmq protocols FILE"
        raise UserFileError(file, f"content with SHA-256 {digest[:12]}, unknown here", allowed)
    module = ModuleType(f"fedmq_user_{digest}")
    module.__file__ = str(path)
    vars(module)[_NAME] = file
    sys.modules[module.__name__] = module  # dataclasses and type hints look up their module there
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))  # noqa: S102 - requested by the user
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        place = f"{file}: line {lines[-1]}" if lines else file
        raise UserFileError(place, f"{type(error).__name__}: {error}", "a file that can be imported") from error
    return module


def load(reference: str) -> ModuleType:
    """Execute an adopted file, once per process; the reference is from :func:`adopt` or a run folder's scenario.

    Raises:
        UserFileError: no file of this content was adopted on this machine, or executing it fails.
    """
    with _LOCK:
        return _executed(reference)


def place_of_error(error: BaseException) -> str:
    """File name and line of the last call of a user's file that led to an error; empty if there is none."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _NAME in frame.f_globals:
            place = f"{frame.f_globals[_NAME]}: line {line}"
    return place


#: Types whose equal values are the same value, unlike those of containers, whose items may differ in type.
_SCALARS = (bool, int, float, str, type(None))


class OptionError(ValueError):
    """The value of an option is not allowed; ``__post_init__`` of a schema raises it."""

    def __init__(self, option: str, found: object, allowed: str) -> None:
        self.option = option
        self.found = found
        self.allowed = allowed
        super().__init__(f"{option}: {found!r}, {allowed}")


def schema_problem(schema: object) -> str | None:
    """Why an object cannot be a schema of options; None if it can."""
    if not (isinstance(schema, type) and dataclasses.is_dataclass(schema)):
        return "not a dataclass"
    missing = dataclasses.MISSING
    without = [field.name for field in dataclasses.fields(schema) if field.default is field.default_factory is missing]
    return f"a dataclass without a default for {', '.join(without)}" if without else None


@functools.cache
def _hints(schema: type[Any]) -> dict[str, Any]:
    return get_type_hints(schema, include_extras=True)


@functools.cache
def _adapter(schema: type[Any], option: str) -> TypeAdapter[Any]:
    kind: Any = schema  # to mypy, a type is not hashable
    return TypeAdapter(_hints(kind)[option])


def parsed(schema: type[T], raw: Mapping[str, object], place: str) -> T:
    """A frozen options dataclass from a scenario's keys, with defaults filled in, types and bounds checked.

    ``place`` is the section of the options, for errors.

    Raises:
        InputError: an unknown option, a wrong type or a value out of bounds.
    """
    kind: Any = schema  # to mypy, a type is not hashable
    known = {field.name: field.default for field in dataclasses.fields(schema)}  # type: ignore[arg-type]
    preset = preset_values(kind, raw.get("preset"))
    raw = {**{option: value for option, value in preset.items() if "." not in option}, **raw}
    for option in raw:
        if option not in known:
            allowed = f"one of the options {', '.join(known)}" if known else "no options"
            raise InputError(place, option, f"{did_you_mean(option, known)} {allowed}".strip())
    values: dict[str, Any] = {}
    for option, raw_value in raw.items():
        # A resolved scenario has every default filled in; a validator for each would take a silo's start 40 ms.
        if type(raw_value) in _SCALARS and type(raw_value) is type(known[option]) and raw_value == known[option]:
            values[option] = raw_value
            continue
        try:
            values[option] = _adapter(kind, option).validate_python(raw_value, strict=True)
        except ValidationError as error:
            allowed = Problem.of(error.errors(include_url=False)[0]).allowed
            raise InputError(f"{place}.{option}", raw_value, allowed) from None
    try:
        return schema(**values)
    except OptionError as error:
        raise InputError(f"{place}.{error.option}", error.found, error.allowed) from None
    except ValueError as error:  # of a user's own schema
        raise InputError(place, str(error), f"values that {schema.__name__} accepts") from None


def preset_values(schema: Any, name: object) -> Mapping[str, object]:
    """Options, and keys of other sections such as ``training.batch_size``, that a preset sets unless the scenario does.

    An options dataclass with the option ``preset`` declares them by the preset's name in ``PRESETS``. A key such as
    ``objective.dcmh.eta`` is an option of one base loss, for options that mean something else with another base.
    """
    presets: Mapping[str, Mapping[str, object]] = getattr(schema, "PRESETS", {})
    return presets.get(name, {}) if isinstance(name, str) else {}


def without_effect(options: Any, around: Mapping[str, object]) -> Iterator[tuple[str, object, str]]:
    """Options that are set although they have no effect because their switch is off.

    An options dataclass declares in ``OF`` the conditions of its options: a mapping from condition to option patterns.
    A condition is ``switch``, which holds unless the switch is false, 0, null or "none", or ``switch=value``, or
    several of these joined by "|", of which one must hold. A switch is another option, or a key of the scenario in
    ``around``.

    Yields:
        The option, its value, and the switches with their values as written in a scenario.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    for name, off in _switched_off(options, around).items():
        if (value := getattr(options, name)) != defaults[name]:
            yield name, value, off


def beginnings(options: Any, around: Mapping[str, object]) -> Iterator[tuple[str, int, str, bool]]:
    """Options that say in which round a part of the method begins, as far as the part is switched on.

    An options dataclass declares in ``BEGINS`` what begins then: a mapping from option to words. ``around`` as in
    :func:`without_effect`.

    Yields:
        The option, the round, what begins, and whether the round is the option's default.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    off = _switched_off(options, around)
    for name, what in getattr(options, "BEGINS", {}).items():
        if name not in off:
            value = getattr(options, name)
            yield name, value, what, value == defaults[name]


def _switched_off(options: Any, around: Mapping[str, object]) -> dict[str, str]:
    """Options without effect, with the values of their switches as written in a scenario."""
    values, off_by = {**around, **vars(options)}, dict[str, str]()
    for condition, names in getattr(options, "OF", {}).items():
        terms = [term.partition("=")[::2] for term in condition.split("|")]
        if any(_written(values[switch]) == wanted if wanted else _on(values[switch]) for switch, wanted in terms):
            continue
        off = " and ".join(dict.fromkeys(f"{switch}: {_written(values[switch])}" for switch, _ in terms))
        for name in (option for pattern in names for option in fnmatch.filter(vars(options), pattern)):
            off_by.setdefault(name, off)
    return off_by


def _on(value: object) -> bool:
    return value not in (False, 0, "none", None)


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_plain(options: object) -> dict[str, object]:
    """An options dataclass as plain data: JSON-serialisable, tuples as lists."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(options).items()}
