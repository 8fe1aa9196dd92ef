"""What can be refused of a scenario in a fraction of a second: nothing here loads torch or opens a picture."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from fedmq.config import user_files
from fedmq.config.registry import unknown
from fedmq.config.resolve import Source
from fedmq.config.scenario import Data
from fedmq.data import catalogue
from fedmq.errors import InputError


def refuse_first(source: Source, plug_ins: Mapping[str, Collection[str]]) -> None:
    """Refuse an unknown method, objective or data set, and data that are not there.

    Args:
        source: a scenario whose data are on this machine.
        plug_ins: names of the methods and of the objectives, by scenario key.

    Raises:
        InputError: names file, line and key.
    """
    scenario = source.scenario
    try:
        for key, name in (("protocol.name", scenario.protocol.name), ("objective.base", scenario.objective.base)):
            if not _is_own_file(name) and name not in plug_ins[key]:
                raise unknown(key, name, plug_ins[key])
        if scenario.data is not None:
            _check_data(scenario.data)
    except InputError as error:
        raise InputError(source.place(error.place), error.found, error.allowed) from None


def _is_own_file(name: str) -> bool:
    return user_files.is_path(name) or user_files.is_reference(name)


def _check_data(data: Data) -> None:
    if _is_own_file(data.name):
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
