"""Further rounds for a run: the run stays the same, and its schedules keep the length that they had."""

from __future__ import annotations

from fedmq.clock import WallClock
from fedmq.config.scenario import Scenario
from fedmq.runs.results import read_summary
from fedmq.runs.run_records import RunSummary
from fedmq.storage.json_files import read_json
from fedmq.storage.run_folder import RunFolder, write_text, writing
from fedmq.wire.log_records import NoteKind
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import COORDINATOR


def extended(scenario: Scenario, rounds: int) -> Scenario:
    """A run's scenario with further rounds.

    The learning rate and the methods' schedules run over the rounds of the first scenario; further rounds keep the
    final learning rate. So an extended run gives the model of a run with all rounds and the same
    ``training.schedule_rounds`` from the start.

    Args:
        scenario: the resolved scenario.
        rounds: number of further rounds.
    """
    training = scenario.training.model_copy(update={"schedule_rounds": scenario.schedule_rounds})
    return scenario.model_copy(update={"rounds": scenario.rounds + rounds, "training": training})


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

    Args:
        folder: the run folder.
        scenario: from :func:`extended`.

    Raises:
        InputError: the folder cannot be written.
        DiskError: the disk is full or broken.
    """
    with MessageLog(folder.messages(COORDINATOR), COORDINATOR, WallClock()) as log:
        log.note(NoteKind.EXTENDED, rounds=scenario.rounds)
    if folder.summary.exists():
        kept = folder.root / f"summary-{read_summary(folder).rounds}.json"
        with writing(kept):
            folder.summary.rename(kept)
    write_text(folder.scenario, scenario.dump())
