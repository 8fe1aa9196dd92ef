"""Whether a run folder is one that a scenario's run can go on in."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.federation.population import run_facts
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.message_log import INLINE
from fedmq.wire.messages import COORDINATOR

#: Of a coordinator's log; its first notes say how the run began.
_FIRST_LINES = 8
_SHOWN = 3  # keys that differ are named, the others counted


def check(folder: RunFolder, before: Scenario, scenario: Scenario, place: str, *, inline: bool) -> None:
    """Check that a run folder is of an unfinished run of a scenario.

    Args:
        folder: of the run.
        before: its scenario, as resolved.
        scenario: that is to go on in it, as resolved.
        place: the option that names the folder, for the error.
        inline: whether silos are to run inside the coordinator, without messages.

    Raises:
        InputError: it is of another scenario, whose keys that differ are named, the run is finished, or it began with
            messages and is to go on without, or the reverse: half of it could not be audited.
    """
    there, here = (_flat(run_facts(each)) for each in (before, scenario))
    differ = [key for key in sorted({*there, *here}) if there.get(key) != here.get(key)]
    if differ:
        told = [f"{key} is {there.get(key, 'not given')}, here {here.get(key, 'not given')}" for key in differ[:_SHOWN]]
        more = [f"{len(differ) - _SHOWN} keys more"] if len(differ) > _SHOWN else []
        found = f"a run of another scenario: {'; '.join([*told, *more])}"
        raise InputError(place, found, f"the scenario of that run, {folder.scenario}")
    if folder.summary.exists():
        raise InputError(place, "a finished run", "a run that was stopped before its end")
    began = _began_inline(folder.messages(COORDINATOR))
    if began is not None and began != inline:
        found, allowed = ("without", "launcher inline, as it began") if began else ("with", "silos that send them")
        raise InputError(place, f"a run {found} messages", allowed)


def _began_inline(path: Path) -> bool | None:
    """Whether a coordinator's log says at its start that no messages are exchanged; None where there is no log."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return any(json.dumps(INLINE) in line for line in itertools.islice(file, _FIRST_LINES))
    except OSError:
        return None


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by dots as ``--set`` takes them."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found
