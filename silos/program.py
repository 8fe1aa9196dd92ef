"""The silo program: loads the silo's dataset, connects to the coordinator and executes tasks until stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

import protocols
from fedmq.audit.policy_guard import guard_of, kinds_needed
from fedmq.clock import WallClock
from fedmq.config.faults import Drift, LabelNoise
from fedmq.config.resolve import ResolvedRun
from fedmq.config.scenario import Scenario
from fedmq.config.site import Site
from fedmq.data.item_digests import item_digests
from fedmq.data.silo_dataset import SiloDataset
from fedmq.encoders.gpu import release_unused_memory
from fedmq.errors import RemoteWireError, RunError
from fedmq.evaluation.heldout import HeldOut, forget_inference, load_inference
from fedmq.federation import updates
from fedmq.federation.faults import FaultSchedule, ScheduledFault, attacked, drifted_rows, with_noisy_labels
from fedmq.federation.participant import (
    FATAL_ERRORS,
    START,
    SiteData,
    Starting,
    begin,
    confirm,
    end_reported,
    raise_refused,
)  # fmt: skip
from fedmq.federation.population import Population, build_population, device_of
from fedmq.federation.preflight import refuse
from fedmq.federation.protocol import Encoders, Local, Task, encoders_of
from fedmq.models.two_tower import TwoTower
from fedmq.storage.logs import QUIET, ErrorFile, Logger, LogLevel, LogOptions, open_log
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.channel import Channel
from fedmq.wire.fields import FieldError
from fedmq.wire.handshake import Accepted
from fedmq.wire.inquiry import ScenarioComparison
from fedmq.wire.keys import Identity, load_accepted, load_identity, noise_key
from fedmq.wire.layout import agree, require_layout
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog, StartFacts
from fedmq.wire.messages import Kind, Message
from fedmq.wire.payloads import DiscriminatorDelta, Error, Metrics, Model, Payload, SiloMetrics
from fedmq.wire.sessions import keep_buffers
from protocols.parts.missing_branch import shortened
from silos.failure_reports import FailureReporter
from silos.personal_state import StateNotes, StateStore
from silos.training_slots import Slots, slots_folder

#: Unused memory a silo may keep between tasks, in model sizes. RCSR tasks on features take a seventh less time than
#: with the C library's limits; without a limit they are no faster, and 30 silos hold half a gigabyte more.
KEPT_MODELS = 3


@dataclass(frozen=True)
class SiloArguments:
    """How a silo is started.

    Args:
        run: run as the coordinator has it.
        name: the silo's name.
        connect: the coordinator's URI.
        keys: folder of the silo's key and of the coordinator's public key.
        out: folder for its message log and its personal state.
        device: ``auto``, ``cpu`` or ``cuda:N``; None for the scenario's.
        data: folder of the prepared data, if known; None locates it.
        site: the silo's site, which has its data if the silos have their own data; None without a site file.
        logs: options of the log for operators; None for no log.
        policy: file of the policy for what may leave the silo; None allows everything.
        simulated: `fedmq scenario` started it on this machine, so errors may be reported with their whole text.
    """

    run: ResolvedRun
    name: str
    connect: str
    keys: Path
    out: Path
    device: str | None = None
    data: Path | None = None
    site: Site | None = None
    logs: LogOptions | None = None
    policy: Path | None = None
    simulated: bool = False

    @property
    def scenario(self) -> Scenario:
        """The run's scenario, as resolved."""
        return self.run.scenario


class Silo:
    """A silo with its dataset loaded, ready for tasks.

    Args:
        arguments: how it was started.
        population: the data and its partition among the silos.
        model: the two towers, if silos of one process share them; None builds new ones.
        noise: source of the noise on its updates: the scenario's seed, or a secret of the silo.
    """

    def __init__(
        self, arguments: SiloArguments, population: Population, model: TwoTower | None = None, *, noise: int | bytes
    ) -> None:
        scenario = arguments.scenario
        self.scenario, self.simulated = scenario, arguments.simulated
        self.population = population
        self.script = FaultSchedule(scenario.faults, scenario.seed, population.silos)
        self._device = device_of(arguments.device or scenario.device, population.facts(arguments.name).index)
        self._shared, self._noise, self._clock = model, noise, WallClock()
        self._persistent: tuple[ScheduledFault, ...] | None = None
        # Before the method is made, which needs the model's layout; it may also train on items outside the dataset.
        self._equip(arguments.name, 0)
        self.context = population.context(scenario, self.model)
        # Silos of one process are created again and again; their coordinator has checked the method.
        self.protocol = protocols.create(scenario.protocol, self.context, check=model is None)
        self._anchors = self.protocol.traits().unpaired == "anchored"
        # Layouts of downloaded models: of the whole model, and of the layers that the method shares.
        whole, names = self.context.layout, self.protocol.traits().shared_layers
        self.layouts = {each.digest: each for each in (whole, *([whole.part(names)] if names else []))}
        folder, logs = RunFolder(arguments.out), arguments.logs
        self.store = StateStore(folder.silo_state(self.facts.name))
        self.epochs = self.store.epochs(self._clock)  # of the last task
        console = logs is not None and logs.console  # has the error
        shown = console and logs is not None and logs.level is LogLevel.DEBUG
        self.errors = ErrorFile(folder.errors(self.facts.name), line=not console, shown=shown)

    def _equip(self, name: str, version: int) -> None:
        """Load the silo's dataset and model as of a version; they change only by faults of the scenario."""
        persistent = self.script.persistent(name, version)
        if persistent == self._persistent:
            return
        self._persistent, population = persistent, self.population
        self.facts = self.script.facts(population.facts(name), version)
        held: tuple[Literal["image", "text"], ...] = (
            ("image", "text") if self.facts.paired else ("image",) if self.facts.image else ("text",)
        )
        self.model = self._shared or population.build_model(self.scenario, self._device, held)
        rows = population.train[self.facts.index]
        for place, fault in persistent:
            if isinstance(fault, Drift):
                all_rows = np.sort(np.concatenate(population.train))
                rows = drifted_rows(fault, rows, all_rows, self.script.generator(place, name))
        found = population.rows_of(self.facts, rows)
        self.dataset = self._loaded(found.dataset, image=self.facts.image, text=self.facts.text)
        if len(rows) and not len(self.dataset):  # pooled training leaves other silos without rows
            raise RunError(f"{name}: no item has all modalities of the silo any more, after a fault of kind drift")
        self.unpaired = tuple(
            self._loaded(rows, image=image, text=not image)
            for rows, image in ((found.image_only, True), (found.text_only, False))
            if len(rows)
        )
        for place, fault in persistent:
            if isinstance(fault, LabelNoise):
                self.dataset = with_noisy_labels(fault, self.dataset, self.script.generator(place, name))

    def _loaded(self, rows: np.ndarray, *, image: bool, text: bool) -> SiloDataset:
        """Rows of the data set with the labels that the objective trains on."""
        dataset = self.population.load(rows, image=image, text=text)
        columns = self.population.run_data.label_columns(self.scenario)
        if dataset.labels is None or len(columns) == dataset.labels.shape[1]:
            return dataset
        return replace(dataset, labels=dataset.labels[:, columns].contiguous())

    def local(self, state: Mapping[str, torch.Tensor]) -> Local:
        """What the method trains with, given the silo's personal tensors."""
        return Local(self.facts, self.dataset, self.model, state, self.unpaired if self._anchors else ())

    def respond(self, message: Message) -> tuple[Payload, ...]:
        """The payloads of the answer to a message of kind task, evaluate or evaluate_silo.

        Raises:
            RemoteWireError: the message has a model whose layout is not this scenario's.
        """
        for payload in message.payloads:
            if isinstance(payload, Model):
                require_layout(self.layouts, payload.layout_digest, np.asarray(payload.buffer))
        match message.header.kind:
            case Kind.TASK:
                return self.answer(message)
            case Kind.EVALUATE_SILO:
                return (self.measure_shared(message),)
            case _:
                return (self.measure(message),)

    def answer(self, message: Message) -> tuple[Payload, ...]:
        """Train and return the payloads of the reply.

        A task that is sent again starts from the same personal state and seeds, so the silo computes the same reply
        again and does not have to store it.

        Args:
            message: a message of kind task.
        """
        header, info = message.header, message.task
        assert info is not None  # noqa: S101 - a Message of kind task has it by construction
        self._equip(self.facts.name, header.base_version)
        task = Task(header.sequence, header.base_version, info.round, info.learning_rate, message.payloads)
        try:
            self.epochs = self.store.epochs(self._clock)
            local = replace(self.local(self.store.before(header.sequence)), epochs=self.epochs)
            trained = self.protocol.train(local, task)
        except FieldError as error:
            raise RunError(f"{error}; if training diverged, lower training.learning_rate") from error
        layout, facts = self.context.layout, self.facts
        # Before clipping and noise, which apply only to what is sent.
        sent = (shortened(payload, layout, facts) for payload in trained.payloads)
        payloads = tuple(self.transform(payload, task) for payload in sent)
        # Scripted Byzantine attacks come last, since an attacker would not clip its own update.
        name, number, version = self.facts.name, header.sequence, header.base_version
        for fault, generator in self.script.attacks(name, number, version, header.sent_at):
            payloads = tuple(attacked(fault, payload, generator) for payload in payloads)
        self.store.keep(header.sequence, trained.state, info.settled)
        return payloads

    def measure(self, message: Message) -> Metrics:
        """Evaluate the silo's personal model on the held-out set in both modalities; only metrics leave the silo.

        Args:
            message: a message of kind evaluate, with the number of the silo's last merged task and the payloads of a
                task at the current version.

        Raises:
            RemoteWireError: the method has no personal models.
        """
        # From the state after its last merged task, so that a pending task has no influence.
        encoders, model = self.personal_encoders(message, self.store.before(message.header.sequence + 1))
        heldout = HeldOut.load(self.scenario, self.population)
        measured = heldout.measured(encoders, binary=model.binary, names=(self.facts.name,))
        # With its own data, the silo's part is the whole split.
        return measured if self.population.agreed is None else Metrics({}, measured.per_silo)

    def measure_shared(self, message: Message) -> SiloMetrics:
        """Evaluate the shared model on the silo's own held-out items; only metrics leave the silo.

        Args:
            message: a message of kind evaluate_silo, with the model and the other payloads that its inference needs.

        Raises:
            RemoteWireError: no model, more than one, or one of another layout.
        """
        model, before = self.model, self.model.flat.detach().clone()
        if not self.facts.paired and self.scenario.backbone.adapter_site == "blocks":
            # The evaluation, unlike training, also needs the tower of the modality that the silo lacks.
            model = self.population.build_model(self.scenario, str(model.flat.device), ("image", "text"))
        try:
            load_inference(model, message.payloads)
            heldout = HeldOut.load(self.scenario, self.population)
            return heldout.silo_metrics(encoders_of(model), binary=model.binary, name=self.facts.name)
        finally:
            forget_inference(model)
            self.model.load(before.cpu().numpy())

    def personal_encoders(self, message: Message, state: Mapping[str, torch.Tensor]) -> tuple[Encoders, TwoTower]:
        """The encoders of the silo's personal model, and the towers that they use.

        Args:
            message: a message of kind evaluate, see :meth:`measure`.
            state: the silo's personal tensors.

        Raises:
            RemoteWireError: the method has no personal models.
        """
        if not self.protocol.traits().personalised:
            raise RemoteWireError("unexpected", f"an evaluation at a silo of {self.scenario.protocol.label}")
        self._equip(self.facts.name, message.header.base_version)
        model = self.model
        if self._shared is None and not self.facts.paired and self.scenario.backbone.adapter_site == "blocks":
            # The evaluation, unlike training, also needs the tower of the modality that the silo lacks.
            model = self.population.build_model(self.scenario, str(model.flat.device), ("image", "text"))
        return self.protocol.encoders(replace(self.local(state), model=model), message.payloads), model

    def transform(self, payload: Payload, task: Task) -> Payload:
        """What is sent of a payload: an update is clipped, noised and quantised as the scenario's ``privacy`` says."""
        if not isinstance(payload, updates.TRANSFORMED):
            return payload
        # A second update in the same reply needs different noise.
        second = (payload.KIND,) if isinstance(payload, DiscriminatorDelta) else ()
        path = (self.facts.name, task.base_version, task.sequence, *second)
        buffer = updates.transform(np.asarray(payload.buffer), self.scenario.privacy, self._noise, path)
        return payload if buffer is payload.buffer else replace(payload, buffer=buffer)


def run_silo(
    arguments: SiloArguments,
    logger: Logger | None = None,
    *,
    joined: Callable[[], None] = lambda: None,
    identity: Identity | None = None,
) -> None:
    """Run a silo until the coordinator sends stop.

    Args:
        arguments: how it was started.
        logger: the log for operators; None opens that of the arguments.
        joined: called when the coordinator has accepted the silo.
        identity: its name and key; None loads the key from its folder.

    Raises:
        InputError: a key, a name or the data is invalid, or the coordinator's model has another layout.
    """
    torch.set_num_threads(1)
    _check_start(arguments)
    identity, accepted = identity or load_identity(arguments.keys, arguments.name), load_accepted(arguments.keys)
    logger = logger or open_log(arguments.logs, arguments.name)
    last_message = {"sent_at": 0.0}
    log, link = _log_and_channel(arguments, identity, accepted, lambda: last_message["sent_at"], logger)
    slots = Slots(slots_folder(arguments.run.id), arguments.scenario.slots)
    try:
        # Load the data before the handshake, after which the silo must be ready for tasks.
        start = SiloStart.of(arguments, identity)
        silo, notes = start.silo, None if start.silo is None else StateNotes(start.silo.store, log)
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
                        silo = silo or start.agreed(message)
                        notes = notes or StateNotes(silo.store, log)
                        confirm(link, message)
                    case Kind.LAYOUT if silo is not None:
                        agree(message.layout, silo.context.layout)
                        logger.info("joined")
                        joined()
                    case Kind.TASK | Kind.EVALUATE | Kind.EVALUATE_SILO if silo is not None and notes is not None:
                        reply_to(link, silo, slots, message, logger)
                        release_unused_memory()  # memory of a failed task
                        notes.after_task(message.header.sequence, message.task.settled if message.task else 0)
                    case _:
                        logger.warning("message ignored", kind=message.header.kind.value)
            del message  # the next one may take minutes: release the memory of this one's model
        logger.info("the coordinator has ended the run")
    finally:
        link.close()
        slots.close()
    logger.info("head of the message log", records=log.records, head=log.head)


def _check_start(arguments: SiloArguments) -> None:
    """Check the silo's name and its device, before anything is written or sent."""
    refuse(START, Starting(arguments.name, arguments.device, arguments.scenario, arguments.site))


def _log_and_channel(
    arguments: SiloArguments,
    identity: Identity,
    accepted: Accepted,
    now: Callable[[], float],
    logger: Logger,
) -> tuple[MessageLog, Channel]:
    """A silo's message log and its channel, which sends nothing that the silo's policy forbids.

    Args:
        arguments: how the silo was started.
        identity: its name and key.
        accepted: accepted public keys.
        now: the run's time as the silo knows it, from the time stamp of its last message [s].
        logger: the log for operators.
    """
    clock, run, path = WallClock(), arguments.run.id, RunFolder(arguments.out).messages(arguments.name)
    forbidden = None
    if arguments.policy is not None:
        forbidden = guard_of(arguments.policy, arguments.name, path, kinds_needed(arguments.scenario), logger.warning)
    log = MessageLog(path, arguments.name, clock, logger=logger)
    log.note(LogEvent.STARTED, run=run)
    uri, warn, plain = arguments.connect, logger.warning, arguments.scenario.model_dump(mode="json")
    return log, Channel(
        uri,
        identity,
        accepted,
        run,
        log,
        clock,
        now=now,
        progress=warn,
        forbidden=forbidden,
        options=arguments.scenario.wire,
        comparison=ScenarioComparison(uri, identity, accepted, plain, tells=forbidden is None),
    )


@dataclass(frozen=True)
class SiloStart:
    """A silo before it joins: its data are loaded and described.

    Args:
        arguments: how it was started.
        identity: its key.
        statement: what it states about its data.
        samples: number of its training items.
        content: digest of its data, which it declares in its log.
        silo: ready for tasks; None until the silos have agreed on labels and inputs.
        data: data of a silo with its own data; None in a simulated partition.
    """

    arguments: SiloArguments
    identity: Identity
    statement: tuple[Payload, ...]
    samples: int
    content: str
    silo: Silo | None
    data: SiteData | None = None

    @classmethod
    def of(cls, arguments: SiloArguments, identity: Identity) -> SiloStart:
        """Load the data.

        Raises:
            InputError: the data cannot be read, a silo with its own data has no site file, or this machine does not
                have the device.
        """
        scenario, name, run = arguments.scenario, arguments.name, arguments.run
        here = scenario.model_copy(update={"device": arguments.device or scenario.device})
        device_of(here.device)  # a silo with its own data would use it only after the agreement
        if scenario.data is None:
            data = SiteData.load(here, arguments.site, run.id, file=run.source.file)
            return cls(arguments, identity, data.statement, data.samples, data.content, None, data)
        population = build_population(here, folder=arguments.data, pooled=run.pooled)
        silo = _silo(arguments, identity, population)
        items = item_digests(population.prepared, scenario.dealt)
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


def reply_to(
    link: Channel,
    silo: Silo,
    slots: Slots,
    message: Message,
    logger: Logger = QUIET,
    fatal: tuple[type[Exception], ...] = FATAL_ERRORS,
) -> None:
    """Execute a task or an evaluation, and send the reply, or the error unless it is a fatal one."""
    header, began = message.header, time.monotonic()
    what = {"task": header.sequence, "round": message.task.round} if message.task else {"version": header.base_version}
    try:
        with slots.one():
            logger.debug("training" if header.kind is Kind.TASK else "evaluating", **what)
            payloads = silo.respond(message)
            release_unused_memory()  # before the slot is released to the next silo
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
    personal = "evaluated the personal model" if header.kind is Kind.EVALUATE else "evaluated the shared model"
    done = "trained" if header.kind is Kind.TASK else personal
    if header.kind is Kind.TASK and silo.epochs.epochs_before:
        what["continued_after_epoch"] = silo.epochs.epochs_before
    logger.info(done, seconds=round(time.monotonic() - began, 1), **what)
