"""Check that a scenario's run can be resumed in a run folder."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.federation.population import run_facts
from fedmq.runs.results import read_summary
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.log_records import NoteKind, NoteRecord, read_log
from fedmq.wire.messages import COORDINATOR

#: Number of records read of a coordinator's log; its first notes say how the run started.
_FIRST_LINES = 8
_SHOWN = 3  # differing keys that are named; further ones are counted


def check(
    folder: RunFolder, before: Scenario, scenario: Scenario, place: str, *, inline: bool, extend: bool = False
) -> None:
    """Check that a run folder is of a run of a scenario: unfinished, not evaluated at its end, or to be extended.

    Args:
        folder: the run folder.
        before: its scenario, as resolved.
        scenario: the scenario to resume with, as resolved.
        place: the option that names the folder, for the error.
        inline: whether silos are to run inside the coordinator, without messages.
        extend: whether the run is to be extended by further rounds, for which it may be finished.

    Raises:
        InputError: the folder belongs to another scenario (the error names the differing keys), the run is finished, or
            it would continue without messages after starting with them, or the reverse: an audit could then cover only
            a part of it.
    """
    old, new = (_flat(run_facts(each)) for each in (before, scenario))
    old["rounds"], new["rounds"] = before.rounds, scenario.rounds  # an extended run has more than its id says
    differ = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    if differ:
        named = [f"{key} is {old.get(key, 'not given')}, here {new.get(key, 'not given')}" for key in differ[:_SHOWN]]
        more = [f"{len(differ) - _SHOWN} keys more"] if len(differ) > _SHOWN else []
        found = f"a run of another scenario: {'; '.join([*named, *more])}"
        raise InputError(place, found, f"the scenario of that run, {folder.scenario}")
    if folder.summary.exists() and not extend and not lacks_evaluation(folder):
        allowed = "a run that was stopped before its end, or --extend ROUNDS for further rounds"
        raise InputError(place, "a finished run", allowed)
    if extend and not any(folder.checkpoints.glob("version-*")):
        raise InputError(place, "a run without a checkpoint", "a run with its checkpoints, which `fedmq prune` removes")
    if extend and folder.summary.exists() and read_summary(folder).stopped_early:
        found = f"a run that evaluation.patience ended after {read_summary(folder).versions} rounds"
        raise InputError(place, found, "no --extend, which would end at once; a new run with a higher patience")
    started_inline = _started_inline(folder.messages(COORDINATOR))
    if started_inline is not None and started_inline != inline:
        found, allowed = (
            ("without", "launcher inline, as at its start") if started_inline else ("with", "silos that send them")
        )
        raise InputError(place, f"a run {found} messages", allowed)


def lacks_evaluation(folder: RunFolder) -> bool:
    """Whether the last version of a finished run is not evaluated, which a resumed run makes up for."""
    summary = read_summary(folder)
    return summary.versions in summary.unevaluated


def _started_inline(path: Path) -> bool | None:
    """Whether a coordinator's log notes at its start that no messages are exchanged; None without a log."""
    try:
        first = [record for _, record in itertools.islice(read_log(path), _FIRST_LINES)]
    except InputError:
        return None
    return any(isinstance(record, NoteRecord) and record.text is NoteKind.INLINE for record in first)


def _flat(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested mappings as one, keys joined by dots as ``--set`` takes them."""
    found: dict[str, object] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found
