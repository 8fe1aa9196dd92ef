"""Registries of names: what a scenario may name of one kind, wherever it comes from.

A part is built in, or comes with an installed package that names it in an entry point group, or is a file of the
user's own. Built-in names win over entry points of the same name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from types import ModuleType
from typing import Generic, TypeVar, cast

from fedmq.config import user_files
from fedmq.config.user_files import UserFileError
from fedmq.errors import InputError
from fedmq.text import one_of

T = TypeVar("T")


class Registry(Generic[T]):
    """The parts of one kind by name.

    Args:
        key: of the scenario that names one, e.g. ``protocol.name``.
        group: entry point group of installed packages; an entry point names a module.
        attribute: what such a module, or a user's file, holds the part in, e.g. ``PROTOCOL``.
        check: says what is wrong with an object that is no such part; None if nothing is.
        expected: the part in words, for the error.
        built_in: parts that are there from the start.
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
        self._found: dict[str, str] = {}

    def add_package(self, package: str) -> None:
        """Add the modules of a package, by their file names; those with a leading underscore are its own."""
        if package not in self._packages:
            self._packages.append(package)
            self._found = {}

    def built_in(self) -> tuple[str, ...]:
        """The built-in names, sorted where they are modules."""
        return (*self._built_in, *sorted(self._modules()))

    def names(self) -> tuple[str, ...]:
        """The built-in names, then those of installed packages."""
        own = self.built_in()
        return (*own, *sorted(each.name for each in entry_points(group=self.group) if each.name not in own))

    def module(self, name: str) -> ModuleType | None:
        """The module that a part stands in; None for one that stands in none of its own.

        Raises:
            InputError: there is nothing of that name, or its module cannot be imported.
        """
        if user_files.is_reference(name):
            return user_files.load(name)
        if name in self._built_in:
            return None
        if (package := self._modules().get(name)) is not None:
            return importlib.import_module(f"{package}.{name}")
        for each in entry_points(group=self.group, name=name):
            try:
                found = each.load()
            except Exception as error:
                raise UserFileError(self._place(name), f"{type(error).__name__}: {error}", each.value) from error
            if isinstance(found, ModuleType):
                return found
            raise UserFileError(self._place(name), each.value, f"a module that holds {self.attribute}")
        raise InputError(self.key, name, f"{one_of(name, self.names())}, or the path of a file of your own, ./mine.py")

    def find(self, name: str) -> T:
        """The part of a name.

        Args:
            name: a built-in one, one of an entry point, or the reference of a user's file, ``mine.py@<SHA-256>``.

        Raises:
            InputError: there is none; a near name is suggested.
            UserFileError: a user's file or a package's module does not hold such a part.
        """
        module = self.module(name)
        if module is None:
            return self._built_in[name]
        if not hasattr(module, self.attribute):
            place = self._place(name)
            raise UserFileError(place, f"no {self.attribute}", f"{self.attribute} = ..., {self._expected}")
        found = getattr(module, self.attribute)
        if (wrong := self._check(found)) is not None:
            raise UserFileError(f"{self._place(name)}: {self.attribute}", wrong, self._expected)
        return cast(T, found)

    def _place(self, name: str) -> str:
        return user_files.label(name) if user_files.is_reference(name) else f"entry point {self.group}: {name}"

    def _modules(self) -> dict[str, str]:
        """Built-in modules, with the packages they are of."""
        if not self._found:
            self._found = {
                found.name: package
                for package in self._packages
                for found in pkgutil.iter_modules(importlib.import_module(package).__path__)
                if not found.ispkg and not found.name.startswith("_")
            }
        return self._found
