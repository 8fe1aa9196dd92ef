"""Continuing a run: whether a folder can be resumed, further rounds, and removing what only a continuation needs."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from fedmq.clock import WallClock
from fedmq.config.resolve import parse
from fedmq.config.run_id import flat
from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.federation.population import run_facts
from fedmq.runs.results import read_summary
from fedmq.runs.run_records import RunSummary
from fedmq.storage.json_files import read_json
from fedmq.storage.run_folder import RunFolder, write_text, writing
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import NoteRecord, read_log
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import COORDINATOR

#: Number of records read of a coordinator's log; its first notes say how the run started.
_FIRST_LINES = 8
_SHOWN = 3  # differing keys that are named; further ones are counted


def check(
    folder: RunFolder, before: Scenario, scenario: Scenario, place: str, *, inline: bool, extend: bool = False
) -> None:
    """Check that a run folder is of a run of a scenario: unfinished, not evaluated at its end, or to be extended.

    Raises:
        InputError: the folder belongs to another scenario (the error names the differing keys), the run is finished, or
            it would continue without messages after starting with them, or the reverse: an audit could then cover only
            a part of it.
    """
    old, new = (flat(run_facts(each)) for each in (before, scenario))
    old["rounds"], new["rounds"] = before.rounds, scenario.rounds  # an extended run has more than its id says
    differ = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    if differ:
        named = [f"{key} is {old.get(key, 'not given')}, here {new.get(key, 'not given')}" for key in differ[:_SHOWN]]
        more = [f"{len(differ) - _SHOWN} keys more"] if len(differ) > _SHOWN else []
        problem = f"a run of another scenario: {'; '.join([*named, *more])}"
        raise InputError(place, problem, f"the scenario of that run, {folder.scenario}")
    if folder.summary.exists() and not extend and not lacks_evaluation(folder):
        allowed = "a run that was stopped before its end, or --extend ROUNDS for further rounds"
        raise InputError(place, "a finished run", allowed)
    if extend and not any(folder.checkpoints.glob("version-*")):
        raise InputError(place, "a run without a checkpoint", "a run with its checkpoints, which `fedmq prune` removes")
    if extend and folder.summary.exists() and (ended_by := read_summary(folder).ended_by) is not None:
        problem = f"a run that {ended_by} ended after {read_summary(folder).versions} rounds"
        raise InputError(place, problem, f"no --extend, which would end at once; a new run with another {ended_by}")
    started_inline = _started_inline(folder.messages(COORDINATOR))
    if started_inline is not None and started_inline != inline:
        problem, allowed = (
            ("without", "launcher inline, as at its start") if started_inline else ("with", "silos that send them")
        )
        raise InputError(place, f"a run {problem} messages", allowed)


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
    return any(isinstance(record, NoteRecord) and record.event is LogEvent.INLINE for record in first)


def extended(scenario: Scenario, rounds: int, path: Path) -> Scenario:
    """A run's scenario with further rounds.

    The learning rate and the methods' schedules run over the rounds of the first scenario; further rounds keep the
    final learning rate. So an extended run gives the model of a run with all rounds and the same
    ``training.schedule_rounds`` from the start.

    Raises:
        InputError: the scenario does not allow further rounds, e.g. because their learning rate would be 0.
    """
    training = scenario.training.model_copy(update={"schedule_rounds": scenario.schedule_rounds})
    longer = scenario.model_copy(update={"rounds": scenario.rounds + rounds, "training": training})
    return parse(longer.model_dump(mode="json"), path)


def earlier_ends(folder: RunFolder) -> frozenset[int]:
    """Versions at which a run had ended before it was extended.

    Raises:
        InputError: a kept summary is damaged.
    """
    kept = sorted(folder.root.glob("summary-*.json"))
    return frozenset(read_json(path, RunSummary, "the summary of a run").versions for path in kept)


def begin_extension(folder: RunFolder, scenario: Scenario) -> None:
    """Write an extended scenario into its run folder; the summary until now is kept as ``summary-ROUNDS.json``.

    The coordinator's message log gets a note, before anything changes.

    Raises:
        InputError: the folder cannot be written.
        DiskError: the disk is full or broken.
    """
    with MessageLog(folder.messages(COORDINATOR), COORDINATOR, WallClock()) as log:
        log.note(LogEvent.EXTENDED, rounds=scenario.rounds)
    if folder.summary.exists():
        kept = folder.root / f"summary-{read_summary(folder).rounds}.json"
        with writing(kept):
            folder.summary.rename(kept)
    write_text(folder.scenario, scenario.dump())


@dataclass(frozen=True)
class Pruning:
    """What can be removed from a finished run."""

    paths: tuple[Path, ...]
    size: int  # bytes that their removal frees
    kept: str  # why something is kept; empty if nothing is


def plan_pruning(folder: RunFolder, *, personalised: bool) -> Pruning:
    """Find what can be removed.

    For personal models, ``fedmq search --silo`` needs the last checkpoint and each silo's newest personal state.

    Raises:
        InputError: the run is not finished, so that it needs its checkpoints.
    """
    if not folder.summary.exists():
        allowed = "a finished run; an unfinished one needs its checkpoints to be resumed"
        raise InputError(str(folder.root), "a run without summary.json", allowed)
    versions = sorted(folder.checkpoints.glob("version-*"), key=lambda path: (len(path.name), path.name))
    states = sorted(folder.silo_state("*").parent.glob("*/task-*.safetensors"))
    kept = ""
    if personalised and versions:
        newest = {path.parent: path for path in states}
        versions, states = versions[:-1], [path for path in states if newest[path.parent] != path]
        kept = "the last checkpoint and each silo's newest personal state are kept for `fedmq search --silo`"
    return Pruning((*versions, *states), _freed([*versions, *states]), kept)


def _freed(paths: list[Path]) -> int:
    """Bytes of files, each counted once and only if all of its hard links are removed."""
    found = [file for path in paths for file in (path, *path.rglob("*")) if file.is_file() and not file.is_symlink()]
    stats = [file.stat() for file in found]
    removed = Counter((stat.st_dev, stat.st_ino) for stat in stats)
    gone = {key: stat.st_size for stat in stats if removed[key := (stat.st_dev, stat.st_ino)] == stat.st_nlink}
    return sum(gone.values())


def prune(folder: RunFolder, pruning: Pruning) -> None:
    """Remove what :func:`plan_pruning` found, and folders that are empty afterwards.

    Raises:
        InputError: a path cannot be removed.
    """
    for path in pruning.paths:
        with writing(path):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    silos = folder.silo_state("*").parent
    for empty in [*silos.glob("*"), silos, folder.checkpoints]:
        if empty.is_dir() and not any(empty.iterdir()):
            empty.rmdir()
