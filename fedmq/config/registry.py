"""Registries of the plug-ins that a scenario selects by name, e.g. methods and data sets.

A plug-in is built in, an entry point of an installed package, or a Python file of the user. Built-in names take
precedence over entry points of the same name.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar, cast

from fedmq.config import user_files
from fedmq.config.user_files import UserFileError
from fedmq.errors import InputError
from fedmq.text import one_of

T = TypeVar("T")


def names_found(package: str, group: str) -> tuple[str, ...]:
    """Names of the plug-ins of a kind, found without importing any, as that may load torch.

    Args:
        package: the built-in ones are its modules, except those with a leading underscore.
        group: entry point group of installed packages.
    """
    top, *inner = package.split(".")
    found = importlib.util.find_spec(top)
    places = () if found is None else found.submodule_search_locations or ()
    return _with_installed(sorted(_modules_in([str(Path(place, *inner)) for place in places])), group)


def unknown(key: str, name: str, names: Collection[str]) -> InputError:
    """The error of a name that is not a plug-in's.

    Args:
        key: scenario key that selects a plug-in.
        name: the unknown name.
        names: the known ones.
    """
    return InputError(key, name, f"{one_of(name, names)}, or the path of your own Python file, ./mine.py")


def _modules_in(places: Iterable[str]) -> list[str]:
    return [each.name for each in pkgutil.iter_modules(places) if not each.ispkg and not each.name.startswith("_")]


def _with_installed(built_in: Sequence[str], group: str) -> tuple[str, ...]:
    """The built-in names, then those of installed packages."""
    return (*built_in, *sorted(each.name for each in entry_points(group=group) if each.name not in built_in))


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
        if user_files.is_reference(name):
            return user_files.load(name)
        if name in self._built_in:
            return None
        if (package := self._modules().get(name)) is not None:
            return importlib.import_module(f"{package}.{name}")
        for each in entry_points(group=self.group, name=name):
            try:
                loaded = each.load()
            except Exception as error:
                raise UserFileError(self._place(name), f"{type(error).__name__}: {error}", each.value) from error
            if isinstance(loaded, ModuleType):
                return loaded
            raise UserFileError(self._place(name), each.value, f"a module that defines {self.attribute}")
        raise unknown(self.key, name, self.names())

    def find(self, name: str) -> T:
        """The plug-in of a name.

        Args:
            name: a built-in name, the name of an entry point, or a reference to a user's file, ``mine.py@<SHA-256>``.

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
        return user_files.label(name) if user_files.is_reference(name) else f"entry point {self.group}: {name}"

    def _modules(self) -> dict[str, str]:
        """Names of the built-in modules, with their packages."""
        if not self._module_packages:
            self._module_packages = {
                name: package
                for package in self._packages
                for name in _modules_in(importlib.import_module(package).__path__)
            }
        return self._module_packages
