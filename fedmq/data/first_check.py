"""What can be refused of a scenario in a fraction of a second: nothing here loads torch or opens a picture."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
from importlib.metadata import entry_points
from pathlib import Path

from fedmq.config import user_files
from fedmq.config.resolve import Source
from fedmq.config.scenario import Data
from fedmq.data import catalogue
from fedmq.errors import InputError
from fedmq.text import one_of

#: Scenario key of a plug-in, the package or folder with the built-in ones, and the entry points of further ones.
_PLUG_INS = (
    ("protocol.name", ".", "fedmq.protocols"),
    ("objective.base", "objectives", "fedmq.objectives"),
)


def refuse_first(source: Source) -> None:
    """Refuse an unknown method, objective or data set, and data that are not there.

    Args:
        source: a scenario whose data are on this machine.

    Raises:
        InputError: names file, line and key.
    """
    scenario = source.scenario
    try:
        for (key, folder, group), name in zip(
            _PLUG_INS, (scenario.protocol.name, scenario.objective.base), strict=True
        ):
            _check_name(key, name, folder, group)
        if scenario.data is not None:
            _check_data(scenario.data)
    except InputError as error:
        raise InputError(source.place(error.place), error.found, error.allowed) from None


def _check_name(key: str, name: str, folder: str, group: str) -> None:
    if user_files.is_path(name) or user_files.is_reference(name):
        return
    found = importlib.util.find_spec("protocols")
    places = [] if found is None else [str(Path(each, folder)) for each in found.submodule_search_locations or ()]
    built_in = sorted(
        module.name for module in pkgutil.iter_modules(places) if not module.ispkg and not module.name.startswith("_")
    )
    names = (*built_in, *sorted(each.name for each in entry_points(group=group) if each.name not in built_in))
    if name not in names:
        raise InputError(key, name, f"{one_of(name, names)}, or the path of your own Python file, ./mine.py")


def _check_data(data: Data) -> None:
    if user_files.is_path(data.name) or user_files.is_reference(data.name):
        return
    catalogue.check(data)
    path = None if data.path is None else data.path.expanduser()
    if path is None:
        return
    allowed = f"an existing file or folder; docs/reference/data_sets.md shows the layout of {data.name}"
    if not os.path.lexists(path):  # a link that leads nowhere is refused later, with its reason
        raise InputError("data.path", str(data.path), allowed)
    if path.is_dir() and not any(files for _, _, files in os.walk(path, followlinks=True)):
        raise InputError("data.path", f"the folder {data.path}, which holds no file", allowed)
