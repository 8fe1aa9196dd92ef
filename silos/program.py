"""The silo program: loads the silo's dataset, connects to the coordinator and executes tasks until stopped.

A silo answers what the scenario needs and nothing else, whatever the coordinator sends: one task for each version of
the model, at the rate of its round, and the evaluations that the scenario schedules.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fedmq.audit.policy import guard_of, kinds_needed
from fedmq.clock import WallClock
from fedmq.config.resolve import ResolvedRun
from fedmq.data.item_digests import item_digests
from fedmq.encoders.gpu import release_unused_gpu_memory
from fedmq.errors import RemoteWireError
from fedmq.federation.noise import at_norm
from fedmq.federation.participant import (
    FATAL_ERRORS,
    SiteData,
    begin,
    confirm,
    end_reported,
    open_channel,
    raise_refused,
)  # fmt: skip
from fedmq.federation.population import Population, build_population, device_of
from fedmq.federation.protocol import Traits
from fedmq.federation.sums import with_bit
from fedmq.profiling import span
from fedmq.storage.logs import QUIET, Logger, open_log
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.channel import Channel
from fedmq.wire.codec import digest, keep_buffers
from fedmq.wire.handshake import Accepted
from fedmq.wire.keys import Identity, load_accepted, load_identity, noise_key
from fedmq.wire.layout import agree
from fedmq.wire.log_records import MessageRecord, read_log
from fedmq.wire.message_log import MessageLog, StartFacts
from fedmq.wire.messages import COORDINATOR, Header, Kind, Message, Reason
from fedmq.wire.payloads import Error, Model, Payload, SealedShares, sizes
from silos.personal_state import StateNotes
from silos.secure_sums import SecureSums
from silos.tasks import FailureReporter, Silo, SiloArguments, Slots, slots_folder

#: Unused memory a silo may keep between tasks, in model sizes. RCSR tasks on features take a seventh less time than
#: with the C library's limits; without a limit they are no faster, and 30 silos hold half a gigabyte more.
KEPT_MODELS = 3


def run_silo(
    arguments: SiloArguments,
    logger: Logger | None = None,
    *,
    joined: Callable[[], None] = lambda: None,
    identity: Identity | None = None,
) -> None:
    """Run a silo until the coordinator sends stop; ``joined`` is called when the coordinator has accepted it.

    Raises:
        InputError: a key, a name or the data is invalid, or the coordinator's model has another layout.
    """
    torch.set_num_threads(1)
    device_of(arguments.device or arguments.scenario.device)  # refused before anything is written or sent
    identity = identity or load_identity(arguments.keys, arguments.name)
    accepted = load_accepted(arguments.keys, COORDINATOR)  # a silo exchanges messages only with it
    logger = logger or open_log(arguments.logs, arguments.name)
    last_message = {"sent_at": 0.0}
    log, link = _log_and_channel(arguments, identity, accepted, lambda: last_message["sent_at"], logger)
    slots = Slots(slots_folder(arguments.run.id), arguments.scenario.slots)
    try:
        # Load the data before the handshake, after which the silo must be ready for tasks.
        start = SiloStart.of(arguments, identity)
        sums = secure_sums_of(arguments, identity, log)
        ready = None if start.silo is None else ReadySilo.of(start.silo, arguments.run, log, sums)
        log.start(identity, accepted, StartFacts.of(arguments.run, start.content))
        link.statement = start.statement
        receive = begin(link, logger, start.data, uri=arguments.connect, samples=start.samples, **start.held)
        while (message := receive()) is not None and message.header.kind is not Kind.STOP:
            receive = link.receive
            last_message["sent_at"] = message.header.sent_at
            if message.header.kind is Kind.ERROR:
                raise_refused(message, arguments.name)
                continue
            with end_reported(link):
                match message.header.kind:
                    case Kind.AGREEMENT:
                        ready = ready or ReadySilo.of(start.agreed(message), arguments.run, log, sums)
                        confirm(link, message)
                    case Kind.LAYOUT if ready is not None:
                        agree(message.layout, ready.silo.context.layout)
                        logger.info("joined")
                        joined()
                    case Kind.TASK | Kind.SUM | Kind.EVALUATE | Kind.EVALUATE_SILO if ready is not None:
                        reply_to(link, ready, slots, message, logger)
                        release_unused_gpu_memory()  # memory of a failed task
                        ready.notes.after_task(message.header.sequence, message.task.committed if message.task else 0)
                    case _:
                        logger.warning("message ignored", kind=message.header.kind.value)
            del message  # the next one may take minutes: release the memory of this one's model
        logger.info("the coordinator has ended the run")
    finally:
        slots.close()
        link.close()
    logger.info("head of the message log", records=log.records, head=log.head)


def _log_and_channel(
    arguments: SiloArguments, identity: Identity, accepted: Accepted, now: Callable[[], float], logger: Logger
) -> tuple[MessageLog, Channel]:
    """A silo's message log and its channel, which sends nothing that the silo's policy forbids."""
    run, forbidden = arguments.run, None
    if arguments.policy is not None:
        path = RunFolder(arguments.out).messages(arguments.name)
        forbidden = guard_of(arguments.policy, arguments.name, path, kinds_needed(run.scenario), logger.warning)
    return open_channel(
        run,
        arguments.connect,
        arguments.out,
        identity,
        accepted,
        clock=WallClock(),
        now=now,
        logger=logger,
        forbidden=forbidden,
        ends_with_other_run=arguments.ends_with_other_run,
    )


#: Evaluations of a version with another model than before that a silo answers in a run: a coordinator that was killed
#: before its checkpoint repeats the merge, on a wall clock of other replies.
_REPEATED_MERGES = 8
_NEW_RUN = "if the run was begun anew, start the silo with another folder (--out)"
_Contents = tuple[tuple[str, int, str], ...]


class AgreedSchedule:
    """What the coordinator may ask of a silo, and what it has asked, by its log also of earlier processes."""

    def __init__(self, run: ResolvedRun, traits: Traits, log: MessageLog) -> None:
        self._scenario, self._traits, self._log = run.scenario, traits, log
        self._tasks: dict[int, tuple[int, _Contents]] = {}
        self._models: dict[tuple[int, int], str] = {}  # of tasks, by version and size, as a method may send a part
        self._evaluated: dict[tuple[Kind, int], set[_Contents]] = {}
        self._sums: dict[tuple[int, str], str] = {}  # of secure sums, by version and kind of payload
        self._repeated = 0
        for _, record in read_log(log.path):
            if isinstance(record, MessageRecord) and record.action == "received" and record.header.run == run.id:
                found = zip(record.payloads, record.digests, strict=False)
                self._take(record.header, tuple((kind, size, content) for (kind, size), content in found))

    @property
    def tasks(self) -> int:
        """Number of different tasks that the silo was sent, also to earlier processes."""
        return len(self._tasks)

    def check(self, message: Message) -> None:
        """Check a message of kind task, evaluate or evaluate_silo, which counts from here on.

        Raises:
            RemoteWireError: the scenario has no such request, or another one of this version; the log says so.
        """
        contents = tuple(
            (kind, size, digest(payload))
            for (kind, size), payload in zip(sizes(message.payloads), message.payloads, strict=True)
        )
        wrong = self._outside(message) or self._take(message.header, contents)
        if wrong is not None:
            self._log.refused(COORDINATOR, Reason.UNSCHEDULED, wrong, 0)
            raise RemoteWireError(Reason.UNSCHEDULED, wrong)

    def _outside(self, message: Message) -> str | None:
        """What of a request the scenario does not have; None if it may have it."""
        scenario, header, task = self._scenario, message.header, message.task
        version, rounds = header.base_version, scenario.rounds
        if header.kind is Kind.SUM and scenario.privacy.secure_aggregation is None:
            return "a step of a secure sum, which the scenario does not have"
        if header.kind is Kind.SUM and self._tasks.get(version, (0,))[0] != header.sequence:
            return f"a step of a secure sum of version {version} without this silo's task"
        if header.kind is Kind.EVALUATE and not self._traits.personalised:
            return f"an evaluation of a personal model, which {scenario.protocol.label} has none of"
        if header.kind is Kind.EVALUATE_SILO and not (
            scenario.silos_evaluate and scenario.evaluation.due(version, rounds)
        ):
            return f"an evaluation of version {version} on the silo's own items, which the scenario does not schedule"
        if header.kind is Kind.EVALUATE and version > rounds:
            return f"an evaluation of version {version}, but the scenario has {rounds} rounds"
        if task is None or header.kind is not Kind.TASK:
            return None
        if (task.round, task.rounds) != (version, rounds) or version >= rounds:
            said = f"a task of round {task.round} of {task.rounds} with version {version}"
            return f"{said}, but the scenario has {rounds} rounds, each with the version of its number"
        if not 1 <= header.sequence <= version + 1:
            return f"a task with number {header.sequence} in round {version}: a silo has at most one task in each round"
        rate = scenario.training.rate_at(version, scenario.schedule_rounds)
        if task.learning_rate != rate:
            return f"a task with the learning rate {task.learning_rate!r}, but in round {version} it is {rate!r}"
        return None

    def _take(self, header: Header, contents: _Contents) -> str | None:
        """Count a request; returns what earlier ones of its version contradict, None if they agree."""
        version = header.base_version
        models = {(version, size): content for kind, size, content in contents if kind == Model.KIND}
        if header.kind is Kind.TASK:
            if self._tasks.setdefault(version, (header.sequence, contents)) != (header.sequence, contents):
                return f"a second task of round {version} with other content: the silo answers one; {_NEW_RUN}"
            self._models |= models
            return None
        if header.kind is Kind.SUM:
            for kind, _, content in contents:
                if kind != SealedShares.KIND and self._sums.setdefault((version, kind), content) != content:
                    return f"other {kind} of version {version} than before: the silo takes part in one sum; {_NEW_RUN}"
            return None
        if header.kind not in (Kind.EVALUATE, Kind.EVALUATE_SILO):
            return None
        if not self._traits.model_per_silo and any(self._models.get(at, one) != one for at, one in models.items()):
            return f"an evaluation of another model of version {version} than the silo was sent to train"
        known = self._evaluated.setdefault((header.kind, version), set())
        asked = tuple(each for each in contents if each[0] == Model.KIND)
        if known and asked not in known:
            if self._repeated >= _REPEATED_MERGES:
                return f"an evaluation of another model of version {version} than before"
            self._repeated += 1
        known.add(asked)
        return None


@dataclass(frozen=True)
class ReadySilo:
    """A silo that has joined."""

    silo: Silo
    agreed: AgreedSchedule  # what its coordinator may ask of it
    notes: StateNotes  # notes in its log about its personal state
    sums: SecureSums | None = None  # its part in secure sums; None without them

    @classmethod
    def of(cls, silo: Silo, run: ResolvedRun, log: MessageLog, sums: SecureSums | None) -> ReadySilo:
        """The silo of a run with its log."""
        return cls(silo, AgreedSchedule(run, silo.protocol.traits(), log), StateNotes(silo.store, log), sums)

    def respond(self, message: Message) -> tuple[Payload, ...]:
        """The payloads of the answer to a message that was agreed on; in a run with secure sums without its update."""
        header, method = message.header, self.silo.protocol
        privacy = self.silo.scenario.privacy
        if self.sums is not None and header.kind is Kind.SUM:
            return self.sums.respond(message, with_bit(method.sum_layout(), privacy))
        if header.kind is Kind.TASK:
            self.silo.check_budget(self.agreed.tasks)
        payloads = self.silo.respond(message)
        if self.sums is None or header.kind is not Kind.TASK:
            return payloads
        layout, privacy = with_bit(method.sum_layout(), privacy), at_norm(privacy, message.payloads)
        return self.sums.withhold(header.base_version, payloads, layout, self.silo.facts, privacy)


def secure_sums_of(arguments: SiloArguments, identity: Identity, log: MessageLog) -> SecureSums | None:
    """A silo's part in secure sums, for which it accepts all silos' keys; None if the scenario has none."""
    if arguments.scenario.privacy.secure_aggregation is None:
        return None
    accepted = load_accepted(arguments.keys)
    return SecureSums(arguments.run, identity, accepted, arguments.keys, arguments.out, log)


@dataclass(frozen=True)
class SiloStart:
    """A silo before it joins: its data are loaded and described."""

    arguments: SiloArguments
    identity: Identity
    statement: tuple[Payload, ...]  # what it states about its data
    samples: int
    content: str  # digest of its data, which it declares in its log
    silo: Silo | None  # ready for tasks; None until the silos have agreed on labels and inputs
    data: SiteData | None = None  # data of a silo with its own data; None in a simulated partition

    @classmethod
    @span("data")
    def of(cls, arguments: SiloArguments, identity: Identity) -> SiloStart:
        """Load the data.

        Raises:
            InputError: the data cannot be read, or a silo with its own data has no site file.
        """
        scenario, name, run = arguments.scenario, arguments.name, arguments.run
        here = scenario.model_copy(update={"device": arguments.device or scenario.device})
        if scenario.data is None:
            data = SiteData.load(here, arguments.site, run.id, file=run.source.file)
            return cls(arguments, identity, data.statement, data.samples, data.content, None, data)
        population = build_population(here, folder=arguments.data, pooled=run.pooled)
        silo = _silo(arguments, identity, population)
        items = item_digests(population.prepared, scenario.dataset)
        statement = population.statement(population.facts(name), items, run.id)
        return cls(arguments, identity, (statement,), len(silo.dataset), population.prepared.content, silo)

    @property
    def held(self) -> dict[str, str]:
        """The modalities of a silo with its own data, for the log."""
        return {} if self.data is None else {"data": self.data.held}

    def agreed(self, message: Message) -> Silo:
        """The silo, once the silos have agreed on labels and inputs.

        Raises:
            RemoteWireError: the agreement does not fit the silo.
        """
        assert self.data is not None  # noqa: S101 - only silos with their own data are sent an agreement
        population = self.data.population(self.arguments.name, message.payloads)
        return _silo(self.arguments, self.identity, population)


def _silo(arguments: SiloArguments, identity: Identity, population: Population) -> Silo:
    scenario = arguments.scenario
    noise = noise_key(identity) if scenario.privacy.noise_from == "key" else scenario.seed
    silo = Silo(arguments, population, noise=noise)
    keep_buffers(KEPT_MODELS * silo.model.flat.nbytes)
    return silo


#: What a silo does on a request, and has done, for its operator.
_DOES = {
    Kind.TASK: ("training", "trained"),
    Kind.SUM: ("summing", "took part in a secure sum"),
    Kind.EVALUATE: ("evaluating", "evaluated the personal model"),
    Kind.EVALUATE_SILO: ("evaluating", "evaluated the shared model"),
}


def reply_to(
    link: Channel,
    ready: ReadySilo,
    slots: Slots,
    message: Message,
    logger: Logger = QUIET,
    fatal: tuple[type[Exception], ...] = FATAL_ERRORS,
) -> None:
    """Execute a task or an evaluation that was agreed on; send the reply, or the error unless it is a fatal one."""
    header, began, silo = message.header, time.monotonic(), ready.silo
    what = {"task": header.sequence, "round": message.task.round} if message.task else {"version": header.base_version}
    try:
        ready.agreed.check(message)
        with slots.one():
            logger.debug(_DOES[header.kind][0], **what)
            payloads = ready.respond(message)
            release_unused_gpu_memory()  # before the slot is released to the next silo
        silo.disk_queue.settle()  # without the slot, which the next silo computes in meanwhile
    except fatal:
        raise
    except Exception as error:
        reporter = FailureReporter(silo.facts.name, silo.errors, logger, whole=silo.simulated)
        reported = reporter.report(error, header, what)
        link.send(
            Kind.SILO_RESULT if header.kind is Kind.EVALUATE_SILO else Kind.ERROR,
            (Error.of_task(error, f"task {header.sequence}: {reported}"),),
            sequence=header.sequence,
            reply_to=header.sequence,
            base_version=header.base_version,
        )
        return
    number, base = header.sequence, header.base_version
    kind = Kind.SILO_RESULT if header.kind is Kind.EVALUATE_SILO else Kind.REPLY
    link.send(kind, payloads, sequence=number, reply_to=number, base_version=base)
    if header.kind is Kind.TASK and silo.epochs.epochs_before:
        what["continued_after_epoch"] = silo.epochs.epochs_before
    logger.info(_DOES[header.kind][1], seconds=round(time.monotonic() - began, 1), **what)
