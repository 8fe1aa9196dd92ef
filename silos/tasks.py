"""A silo's tasks: how it answers them, what it reports if one fails, and how many silos of a machine train at a time.

A slot for training is a file lock, which the kernel releases when its silo ends or is killed. Waiting silos queue, in
no fixed order, on another lock: only its holder polls the slots, at short intervals. Each process locks a file of its
own, ``user-...``, as long as it uses the folder. A folder without such a lock is removed by the last process that used
it, or after a SIGKILL by the next one that starts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Literal

import numpy as np
import torch

import protocols
from fedmq.clock import WallClock
from fedmq.config.faults import Drift, LabelNoise
from fedmq.config.resolve import ResolvedRun
from fedmq.config.scenario import Scenario
from fedmq.config.site import Site
from fedmq.data.silo_dataset import validation_split
from fedmq.errors import FedmqError, InputError, RemoteWireError, RunError
from fedmq.evaluation.heldout import HeldOut, forget_inference, load_inference
from fedmq.federation import updates
from fedmq.federation.faults import FaultSchedule, ScheduledFault, attacked, drifted_rows, with_noisy_labels
from fedmq.federation.noise import affordable_tasks, at_norm, protected
from fedmq.federation.participant import reportable  # fmt: skip
from fedmq.federation.population import Population, device_of
from fedmq.federation.protocol import Encoders, Local, Task, encoders_of
from fedmq.models.two_tower import TwoTower
from fedmq.profiling import span
from fedmq.storage.locks import is_locked, lock, locked, try_lock, unlock
from fedmq.storage.logs import QUIET, ErrorFile, Logger, LogLevel, LogOptions
from fedmq.storage.run_folder import RunFolder, make_folder, writing
from fedmq.text import print_line, printable
from fedmq.wire.compression import form_of
from fedmq.wire.fields import FieldError
from fedmq.wire.layout import require_layout
from fedmq.wire.messages import Header, Kind, Message
from fedmq.wire.payloads import ControlVariate, Metrics, Model, Payload, SiloMetrics
from protocols.parts.aggregation import shortened, updating
from silos.personal_state import DiskQueue, StateStore


@dataclass(frozen=True)
class SiloArguments:
    """How a silo is started."""

    run: ResolvedRun  # run as the coordinator has it
    name: str
    connect: str  # the coordinator's URI
    keys: Path  # folder of the silo's key and of the coordinator's public key
    out: Path  # folder for its message log and its personal state
    device: str | None = None  # ``auto``, ``cpu`` or ``cuda:N``; None for the scenario's
    data: Path | None = None  # folder of the prepared data, if known; None locates it
    # The silo's site, which has its data if the silos have their own data; None without a site file.
    site: Site | None = None
    logs: LogOptions | None = None  # options of the log for operators; None for no log
    policy: Path | None = None  # file of the policy for what may leave the silo; None allows everything
    # `fedmq scenario` started it on this machine, so errors may be reported with their whole text.
    simulated: bool = False
    ends_with_other_run: bool = False  # end when the coordinator has begun another run, instead of waiting for this one

    @property
    def scenario(self) -> Scenario:
        """The run's scenario, as resolved."""
        return self.run.scenario


class Silo:
    """A silo with its dataset loaded, ready for tasks."""

    def __init__(
        self,
        arguments: SiloArguments,
        population: Population,  # the data and its partition among the silos
        model: TwoTower | None = None,  # the two towers, if silos of one process share them; None builds new ones
        *,
        noise: int | bytes,  # source of the noise on its updates: the scenario's seed, or a secret of the silo
        # Writes its states, so that they are on disk once it is settled; None takes a new one.
        disk_queue: DiskQueue | None = None,
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
        self.disk_queue = disk_queue or DiskQueue()
        self.store = StateStore(folder.silo_state(self.facts.name), self.disk_queue)
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
        trains = updating(self.facts, protocols.traits_of(self.scenario))
        held: tuple[Literal["image", "text"], ...] = (
            ("image", "text") if trains.paired else ("image",) if trains.image else ("text",)
        )
        # Every task and evaluation loads the model that it is sent, or its method's initial or personal parameters.
        self.model = self._shared or population.build_model(self.scenario, self._device, held, initial=False)
        rows = population.train[self.facts.index]
        for place, fault in persistent:
            if isinstance(fault, Drift):
                all_rows = np.sort(np.concatenate(population.train))
                rows = drifted_rows(fault, rows, all_rows, self.script.generator(place, name))
        found = population.rows_of(self.facts, rows)
        share = self.scenario.training.validation if self.facts.paired else 0.0
        trained, held_out = validation_split(found.dataset, share, self.scenario.seed, name)
        load = partial(population.trained_items, self.scenario)
        self.dataset = load(trained, image=self.facts.image, text=self.facts.text)
        self.validation = load(held_out, image=True, text=True) if len(held_out) else None
        if len(rows) and not len(self.dataset):  # pooled training leaves other silos without rows
            raise RunError(f"{name}: no item has all modalities of the silo any more, after a fault of kind drift")
        self.unpaired = tuple(
            load(rows, image=image, text=not image)
            for rows, image in ((found.image_only, True), (found.text_only, False))
            if len(rows)
        )
        for place, fault in persistent:
            if isinstance(fault, LabelNoise):
                self.dataset = with_noisy_labels(fault, self.dataset, self.script.generator(place, name))

    def lend(self, model: TwoTower) -> None:
        """Compute with this model from now on; silos of one process share their models."""
        self._shared = self.model = model

    def local(self, state: Mapping[str, torch.Tensor]) -> Local:
        """What the method trains with, given the silo's personal tensors."""
        own = updates.of_method(state, self.scenario.compression.updates)
        secret = self._noise if isinstance(self._noise, bytes) else None
        unpaired = self.unpaired if self._anchors else ()
        return Local(self.facts, self.dataset, self.model, own, unpaired, self.validation, secret=secret)

    def respond(self, message: Message) -> tuple[Payload, ...]:
        """The payloads of the answer to a message of kind task, evaluate or evaluate_silo.

        They may be sent once the silo's ``disk_queue`` is settled: then its state after the task is on disk.

        Raises:
            RemoteWireError: the message has a model whose layout or form is not this scenario's.
            RunError: the reply would pass the silo's privacy budget.
        """
        form = self.scenario.compression.model.kind
        for payload in message.payloads:
            if isinstance(payload, Model) and (found := form_of(payload.buffer)) != form:
                raise RemoteWireError("unexpected", f"a model with compression {found}, agreed: {form}")
            if isinstance(payload, Model | ControlVariate):
                require_layout(self.layouts, payload.layout_digest, np.asarray(payload.buffer))
        match message.header.kind:
            case Kind.TASK:
                self.check_budget(message.header.sequence)
                return self.answer(message)
            case Kind.EVALUATE_SILO:
                return (self.measure_shared(message),)
            case _:
                return (self.measure(message),)

    def check_budget(self, tasks: int) -> None:
        """Refuse the last of ``tasks`` different tasks of a run if its reply would pass the silo's privacy budget.

        Raises:
            RunError: there are too many.
        """
        if (most := self._affordable) is not None and tasks > most:
            raise RunError(f"privacy.budget: {most} replies have spent it ({self.scenario.privacy.budget})")

    @cached_property
    def _affordable(self) -> int | None:
        """Number of tasks that the silo may answer; None without a budget."""
        uploads = [self.protocol.uploads(silo) for silo in self.context.silos if self.protocol.eligible(silo)]
        count = len(self.dataset)
        tasks = affordable_tasks(self.scenario, uploads, [count], self.scenario.rounds)
        return None if tasks is None else tasks[count]

    @span("compute")
    def answer(self, message: Message) -> tuple[Payload, ...]:
        """Train and return the payloads of the reply.

        A task that is sent again starts from the same personal state and seeds, so the silo computes the same reply
        again and does not have to store it.
        """
        header, info = message.header, message.task
        assert info is not None  # noqa: S101 - a Message of kind task has it by construction
        self._equip(self.facts.name, header.base_version)
        task = Task(header.sequence, header.base_version, info.round, info.learning_rate, message.payloads)
        try:
            self.epochs = self.store.epochs(self._clock)
            before = self.store.before(header.sequence)
            local = replace(self.local(before), epochs=self.epochs)
            trained = self.protocol.train(local, task)
        except FieldError as error:
            raise RunError(f"{error}; if training diverged, lower training.learning_rate") from error
        layout, facts = self.context.layout, updating(self.facts, self.protocol.traits())
        # Before clipping and noise, which apply only to what is sent.
        sent = (shortened(payload, layout, facts) for payload in trained.payloads)
        payloads = tuple(self.transform(payload, task, idle=trained.idle) for payload in sent)
        # Scripted Byzantine attacks come last, since an attacker would not clip its own update.
        name, number, version = self.facts.name, header.sequence, header.base_version
        for fault, generator in self.script.attacks(name, number, version, header.sent_at):
            payloads = tuple(attacked(fault, payload, generator) for payload in payloads)
        # After attacks, as every silo sends what the scenario says.
        payloads, memory = self.compress(payloads, before, idle=trained.idle)
        self.store.keep(header.sequence, {**trained.state, **memory}, info.committed)
        return payloads

    def transform(self, payload: Payload, task: Task, *, idle: bool = False) -> Payload:
        """What is sent of a payload, see :func:`fedmq.federation.noise.protected`."""
        path = (self.facts.name, task.base_version, task.sequence)
        privacy, summed = at_norm(self.scenario.privacy, task.payloads), type(payload) in self._summed
        return protected(payload, privacy, self._noise, path, idle=idle, summed=summed)

    @cached_property
    def _summed(self) -> frozenset[type[Payload]]:
        """Payloads that go through secure sums."""
        return frozenset() if self.scenario.privacy.secure_aggregation is None else self.protocol.sum_layout().kinds

    def compress(
        self, payloads: Sequence[Payload], state: Mapping[str, torch.Tensor], *, idle: bool = False
    ) -> tuple[tuple[Payload, ...], dict[str, torch.Tensor]]:
        """Compress a reply as the scenario says, see :func:`fedmq.federation.updates.compress`."""
        return updates.compress(payloads, self.scenario.compression.updates, self.context.layout, state, idle=idle)

    @span("evaluate")
    def measure(self, message: Message) -> Metrics:
        """Evaluate the silo's personal model on the held-out set in both modalities; only metrics leave the silo.

        Raises:
            RemoteWireError: the method has no personal models.
        """
        # From the state after its last merged task, so that a pending task has no influence.
        encoders, model = self.personal_encoders(message, self.store.before(message.header.sequence + 1))
        heldout = HeldOut.load(self.scenario, self.population)
        measured = heldout.measured(encoders, binary=model.binary, names=(self.facts.name,))
        # With its own data, the silo's part is the whole split.
        return measured if self.population.agreed is None else Metrics({}, measured.per_silo)

    @span("evaluate")
    def measure_shared(self, message: Message) -> SiloMetrics:
        """Evaluate the shared model on the silo's own held-out items; only metrics leave the silo.

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
        """The encoders of the silo's personal model in the given state, and the towers that they use.

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


@dataclass(frozen=True)
class FailureReporter:
    """Reports a silo's failed tasks and evaluations."""

    name: str
    errors: ErrorFile  # file of its tracebacks
    logger: Logger
    whole: bool  # the coordinator learns the whole text, see reportable

    def report(self, error: Exception, header: Header, what: Mapping[str, int]) -> str:
        """Report an error of a request to the silo's operator; returns the text for the coordinator."""
        reported, text = reportable(error, whole=self.whole), f"{type(error).__name__}: {error}"
        if not isinstance(error, FedmqError):
            place = self.errors.add(error, self.name, f"{header.kind} {header.sequence}")
            self.logger.warning("failed", error=text, traceback=place or "above", **what)
            return reported
        self.logger.warning("failed", error=text, **what)
        if self.logger is QUIET and reported != text:  # parts of the text were removed
            print_line(f"{self.name}: task {header.sequence}: {printable(str(error))}", error=True)
        return reported


#: Intervals between polls for a free slot [s]. Each is 2% longer than the one before, so about 2% of the wait so far:
#: slots stay idle only briefly, and a long wait needs few wake-ups.
_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.0005, 0.02, 1.02


class Slots:
    """The slots of one run on this machine, in a folder that its silos share and the last of them removes.

    Raises:
        InputError: the folder cannot be written.
        RunError: the disk is full or broken.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        make_folder(folder.parent)
        with writing(folder), _changing(folder):
            for other in folder.parent.iterdir():
                if other.is_dir() and other != folder:
                    _remove_unused(other)
            folder.mkdir(exist_ok=True)
            self._user = (folder / f"user-{secrets.token_hex(8)}").open("xb")
            try_lock(self._user)
            self._files = [(folder / f"slot-{index}").open("ab") for index in range(count)]
            self._queue = (folder / "queue").open("ab")

    @contextmanager
    def one(self) -> Iterator[None]:
        """Hold a slot; waits until one is free."""
        slot = self._take()
        try:
            yield
        finally:
            unlock(slot)

    @span("slot")
    def _take(self) -> IO[bytes]:
        lock(self._queue)
        try:
            return self._wait()
        finally:
            unlock(self._queue)

    def _wait(self) -> IO[bytes]:
        pause = _FIRST_PAUSE
        while True:
            for file in self._files:
                if try_lock(file):
                    return file
            time.sleep(pause)
            pause = min(pause * _GROWTH, _LONGEST_PAUSE)

    def close(self) -> None:
        """Close all files, which releases their locks; the last user removes the folder."""
        for file in (*self._files, self._queue, self._user):
            file.close()
        with contextlib.suppress(OSError), _changing(self._folder):
            Path(self._user.name).unlink(missing_ok=True)
            _remove_unused(self._folder)


@contextmanager
def _changing(folder: Path) -> Iterator[None]:
    """Hold the lock under which folders next to this one are created and removed."""
    with locked(folder.parent / "lock"):
        yield


def _remove_unused(folder: Path) -> None:
    if any(is_locked(path) for path in folder.glob("user-*")):
        return
    with contextlib.suppress(OSError):
        for path in (*folder.glob("user-*"), *folder.glob("slot-*"), folder / "queue"):
            path.unlink(missing_ok=True)
        folder.rmdir()


def slots_folder(run: str) -> Path:
    """Folder of the slots of a run on this machine, inside a private folder of the user that is created if missing.

    The private folder is in the first usable of ``$XDG_RUNTIME_DIR``, ``$TMPDIR`` and ``/tmp``. On cluster nodes and
    under ``su``, ``$XDG_RUNTIME_DIR`` may not exist.

    Raises:
        InputError: the private folder cannot be created, or belongs to another user.
        RunError: the disk is full or broken.
    """
    configured = [Path(os.environ[name]) for name in ("XDG_RUNTIME_DIR", "TMPDIR") if os.environ.get(name)]
    writable = (place for place in configured if place.is_dir() and os.access(place, os.W_OK | os.X_OK))
    folder = next(writable, Path("/tmp")) / f"fedmq-slots-{os.getuid()}"  # noqa: S108 - private by mode 0700
    with writing(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
        # In a shared folder, another user may already have created a folder or link of this name.
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            allowed = "a folder owned by this user; set TMPDIR to use another place"
            raise InputError(str(folder), "a link or a folder of another user", allowed)
        folder.chmod(0o700)
    return folder / run
