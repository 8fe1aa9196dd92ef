"""The coordinator's part in the agreement on the data: what it expects of peers, and the wait for all silos."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.checkpoints import Checkpoint
from coordinator.data_admission import OwnDataAdmission, SimulatedAdmission
from coordinator.run_context import run_context_of, selectable
from coordinator.sessions import Roster
from coordinator.updates import text_of
from fedmq.config.resolve import ResolvedRun
from fedmq.config.scenario import Scenario
from fedmq.data.item_digests import item_digests
from fedmq.data.warnings import of_spellings
from fedmq.errors import InputError
from fedmq.federation.agreement import FormatError, RunData
from fedmq.federation.population import Population
from fedmq.runs.data_records import AgreementRecord
from fedmq.runs.status import ERROR_CHARACTERS, Status
from fedmq.storage.cache import cache_folder
from fedmq.storage.json_files import read_json
from fedmq.storage.run_folder import RunFolder, write_json
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import Kind, Message

_POLL_SECONDS = 0.2


def admission_of(
    run: ResolvedRun, folder: RunFolder, population: Population | None, saved: Checkpoint | None
) -> SimulatedAdmission | OwnDataAdmission:
    """Which peers may join a run, in which silos without a simulated ``population`` have their own data.

    Raises:
        InputError: the agreement of a run that is resumed is missing or damaged, or an image cannot be read.
    """
    scenario = run.scenario
    if population is not None:
        items = item_digests(population.prepared, scenario.dataset)
        return SimulatedAdmission(population.statements(items, run.id), run.id)
    known = None
    if saved is not None or folder.agreement.exists():
        known = read_json(folder.agreement, AgreementRecord, "what the silos of this run agreed on")
    minimum = scenario.participation.minimum
    return OwnDataAdmission(scenario.silo_names, run.id, evaluator=scenario.evaluator, known=known, minimum=minimum)


def gathered(
    roster: Roster,
    admission: OwnDataAdmission,
    scenario: Scenario,
    folder: RunFolder,
    log: MessageLog,
    status: Callable[[Status], None],
    stop_wanted: Callable[[], bool],
) -> RunData | None:
    """Wait until enough silos have stated their data, and keep what they agreed on; None if a stop was requested.

    Raises:
        InputError: no silo has one of the two modalities.
    """
    conflict = ""

    def report(missing: tuple[str, ...]) -> None:
        nonlocal conflict
        if admission.conflicts.open != conflict:
            conflict = admission.conflicts.open
            if conflict:
                log.logger.warning("data differ", detail=f"{conflict}; waiting for other silos to show which is wrong")
        status(
            Status(
                phase="gathering",
                round=0,
                rounds=scenario.rounds,
                training=0,
                missing=missing,
                refused=(dict(roster.refused), roster.refusal),
                refused_ago=roster.refused_ago,
                online=len(scenario.silo_names) - len(missing),
                lost=0,
                loss=None,
                metrics={},
                bytes=0,
                now=0.0,
                elapsed=roster.elapsed,
            )
        )

    while not (admission.agreeable and (not admission.missing or admission.agreed or _enough(admission, scenario))):
        if stop_wanted():
            return None
        report(admission.missing)
        received = roster.receive(_POLL_SECONDS)
        taken = None if received is None else roster.take(*received)
        if isinstance(taken, Message) and taken.header.kind is Kind.ERROR:
            _failed(roster, log, taken)
    if admission.agreed is None:
        try:
            admission.agree()
        except FormatError as error:
            raise InputError("the silos' data", str(error), "images in one silo at least, and captions") from None
    return _offered(roster, admission, folder, log)


def _failed(roster: Roster, log: MessageLog, message: Message) -> None:
    """Report a silo that ended, or whose policy forbids its statement, before the silos agreed."""
    name, text = message.header.sender, text_of(message)
    record = log.note(LogEvent.ERROR_REPORTED, peer=name, error=text[:ERROR_CHARACTERS])
    roster.failures[name] = text[:ERROR_CHARACTERS]
    log.note(LogEvent.PEER_LOST, peer=name, caused_by=record)


def _enough(admission: OwnDataAdmission, scenario: Scenario) -> bool:
    """Whether enough silos that the method can select have stated their data, and these have what the method needs."""
    minimum = scenario.participation.minimum
    try:
        data = admission.candidate(cache_folder())
    except FormatError:  # no silo has captions yet, or images
        return False
    return minimum is not None and len(selectable(scenario, data)) >= minimum


def _offered(roster: Roster, admission: OwnDataAdmission, folder: RunFolder, log: MessageLog) -> RunData:
    """Keep what the silos have agreed on, and send it to those that have not joined."""
    data = admission.run_data(cache_folder())
    write_json(folder.agreement, admission.record().plain())
    silos = sum(silo.image or silo.text for silo in data.silos)
    log.note(LogEvent.AGREED, data_digest=data.digest, silos=silos, labels=len(data.label_names))
    for silo in data.silos:
        if silo.image != silo.text:  # its operator may have forgotten the other modality
            log.logger.info(f"{silo.name} has {'images' if silo.image else 'captions'} only")
    for line in of_spellings(data.label_names):  # each site may have its own spelling
        log.logger.warning("labels of the silos", detail=line)
    roster.offer()
    return data


def included(
    roster: Roster, admission: OwnDataAdmission, scenario: Scenario, folder: RunFolder, log: MessageLog
) -> RunData:
    """Include the silos that stated their data after the agreement, or refuse those that do not fit the run."""
    for name in sorted(admission.late):
        try:
            run_context_of(scenario, admission.with_late(name, cache_folder()), folder)
        except InputError as error:
            del admission.late[name]
            roster.refuse_late(name, f"{name} cannot take part: {error}")
        else:
            admission.include(name)
            log.logger.info("late silo joins", silo=name)
    return _offered(roster, admission, folder, log)
