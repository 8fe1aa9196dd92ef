"""The one list of checks before a run: each with what it checks, the problem, and how to fix it.

``fedmq scenario`` with and without ``--check``, ``fedmq coordinator``, ``fedmq silo``, ``fedmq evaluator`` and ``fedmq
preflight`` each make those that concern them. The last one also makes those that take seconds, before a silo joins:
whether the coordinator accepts the key, and whether versions, scenario, policy, data, disk and memory fit; and it
trains one step, whose result is discarded.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import psutil
import torch

import protocols
from fedmq.audit.policy import PolicyGuard, guard_of, kinds_needed
from fedmq.config.resolve import ResolvedRun, Source
from fedmq.config.run_id import named
from fedmq.data.extract import left_out
from fedmq.data.silo_dataset import SiloDataset
from fedmq.errors import InputError, RemoteWireError
from fedmq.evaluation.program import EvaluatorArguments
from fedmq.federation import updates
from fedmq.federation.agreement import difference, unknown_name
from fedmq.federation.participant import SiteData
from fedmq.federation.population import build_population, device_of
from fedmq.federation.preflight import SCENARIO, Check, Outcome, Program, Result, Verdict, results
from fedmq.federation.protocol import FederatedProtocol, Local, Task, Trained
from fedmq.launch.preparation import check_data
from fedmq.launch.remote_peer import refuse_local_only
from fedmq.packages import versions
from fedmq.runs import trackers
from fedmq.runs.status import StatusFile, status_of
from fedmq.storage.run_folder import RunFolder
from fedmq.text import Progress, counted, size_text, tensor_text
from fedmq.wire.codec import digest
from fedmq.wire.fields import FieldError
from fedmq.wire.handshake import Accepted
from fedmq.wire.inquiry import SAME_SCENARIO, NoAnswerError, ask_status
from fedmq.wire.keys import Identity, fingerprint, load_accepted, load_identity, words
from fedmq.wire.log_records import MessageRecord, read_log
from fedmq.wire.messages import COORDINATOR, WIRE_VERSION, Kind
from fedmq.wire.payloads import Payload, tensor_bytes
from fedmq.wire.transports.builtin import unknown_host
from protocols.parts.aggregation import shortened, updating
from silos.tasks import Silo, SiloArguments

#: Disk space that a silo's states need, in model sizes: two states of up to two models each, and a snapshot of four.
_DISK_MODELS = 8
#: Disk space for logs, and free memory that should remain after a training step [bytes].
_LOG_BYTES, _SPARE_MEMORY = 50e6, 200e6
#: Time to wait for the coordinator's answer [s].
_ANSWER_SECONDS = 5.0


@dataclass
class Starting:
    """A program that is about to start, and what the checks have learned."""

    run: ResolvedRun
    # The arguments of the silo or of the evaluator; None for another program.
    peer: SiloArguments | EvaluatorArguments | None = None
    progress: Progress | None = None
    keys: tuple[Identity, Accepted] | None = None  # its identity and the accepted public keys; None without usable ones
    status: StatusFile | None = None  # the coordinator's status, if it answers
    guard: PolicyGuard | None = None  # its policy, if it has one that can be read
    site: SiteData | None = None  # the data of a site with its own data
    loaded: Silo = field(init=False)  # the silo with its data; set by the check of the data
    reply: tuple[Payload, ...] = ()  # payloads of the reply to one training step

    @property
    def silo(self) -> SiloArguments:
        """The silo's arguments."""
        assert isinstance(self.peer, SiloArguments)  # noqa: S101 - a check of silos only
        return self.peer


def checks_of(program: Program) -> list[Check[Starting]]:
    """The checks that a program makes, in their order."""
    return [check for check in CHECKS if program in check.programs]


def preflight(program: Program, starting: Starting) -> Iterator[Result]:
    """Make all checks of a program, one after the other; no update is sent, and only the cache is written."""
    torch.set_num_threads(1)
    yield from results(checks_of(program), starting)


# --- this machine ---------------------------------------------------------------------------------------------------
def _of_scenario_file(check: Check[Source]) -> Check[Starting]:
    return Check(check.name, check.fix, lambda starting: check.test(starting.run.source))


def _name(starting: Starting) -> None:
    silo, silos = starting.silo, starting.run.scenario.silo_names
    if silo.name not in silos:
        place = silo.site.place("name") if silo.site is not None and silo.site.name == silo.name else "--name"
        raise InputError(place, silo.name, f"{silos[0]} to {silos[-1]}, as the coordinator's operator has assigned it")


def _device(starting: Starting) -> None:
    """Whether this machine has the device; the error names the site file's line, the option or the scenario's key."""
    peer, scenario = starting.peer, starting.run.scenario
    given, site = (None, None) if peer is None else (peer.device, peer.site)
    silos = scenario.silo_names
    index = silos.index(peer.name) if isinstance(peer, SiloArguments) and peer.name in silos else 0
    try:
        device_of(given or scenario.device, index)
    except InputError as error:
        place = site.place("device") if site is not None and site.device == given else "--device"
        raise InputError(error.place if given is None else place, error.found, error.allowed) from None


def _trackers(starting: Starting) -> None:
    trackers.check(starting.run.scenario.track)


def _cluster(starting: Starting) -> None:
    try:
        refuse_local_only(starting.run.scenario)
    except InputError as error:
        raise InputError(starting.run.source.place(error.place), error.found, error.allowed) from None


def _run_data(starting: Starting) -> None:
    with starting.run.source.naming_the_file():
        check_data(starting.run, starting.progress)


# --- keys and coordinator -------------------------------------------------------------------------------------------
def _versions(starting: Starting) -> list[Outcome]:
    here = ", ".join(f"{name} {version}" for name, version in versions().items())
    detail = f"{here}, wire {WIRE_VERSION}; run {starting.run.id}"
    return [Outcome(Verdict.OK, detail)]


def _keys(starting: Starting) -> list[Outcome]:
    folder, name = starting.silo.keys, starting.silo.name
    identity, accepted = load_identity(folder, name), load_accepted(folder)
    if COORDINATOR not in accepted:
        raise RemoteWireError("unknown_sender", f"no public key of the coordinator in {folder}/accepted")
    starting.keys = identity, accepted
    return [Outcome(Verdict.OK, f"{name} has the key {fingerprint(identity)}: {words(identity)}")]


def _coordinator(starting: Starting) -> list[Outcome]:
    """Whether the coordinator answers, accepts the silo's key, and runs the same scenario.

    The inquiry neither joins the run nor ends a session of the silo.
    """
    uri, run = starting.silo.connect, starting.run.id
    if starting.keys is None:
        if host := unknown_host(uri):
            return [Outcome(Verdict.FAILED, f"{uri}: the name {host} is unknown on this machine")]
        return [Outcome(Verdict.SKIPPED, f"{uri} is not asked without both keys")]
    try:
        status = starting.status = status_of(ask_status(uri, *starting.keys, _ANSWER_SECONDS))
    except NoAnswerError as error:
        return [Outcome(Verdict.SKIPPED, f"{error}; key, scenario and versions are not compared")]
    if status.run != run:
        digests = None if status.coordinator is None else status.coordinator.scenario
        keys = () if digests is None else digests.differing(starting.run.scenario.model_dump(mode="json"))
        which = f", with other values of {named(keys)}" if keys else ""
        detail = f"it runs another scenario: {status.run}, here {run}{which}; {SAME_SCENARIO}"
        return [Outcome(Verdict.FAILED, detail)]
    round_ = f"{status.phase}, round {status.round} of {status.rounds}"
    return [Outcome(Verdict.OK, f"accepts this key, this scenario ({run}) and wire version {WIRE_VERSION}; {round_}")]


def _same_versions(starting: Starting) -> list[Outcome] | None:
    """Whether the coordinator runs the same versions as this process, as the last bits of a model depend on them."""
    if starting.status is None or starting.status.coordinator is None:
        return None
    here, there = versions(), starting.status.coordinator.versions
    pairs = [(name, there.get(name, mine), mine) for name, mine in here.items()]
    if other := [f"{name} {theirs} there, {mine} here" for name, theirs, mine in pairs if theirs != mine]:
        return [Outcome(Verdict.DIFFERS, f"{', '.join(other)}: the silo can join; last bits of models may differ")]
    return [Outcome(Verdict.OK, ", ".join(f"{name} {here[name]}" for name in here))]


# --- the silo -------------------------------------------------------------------------------------------------------
def _readable_policy(starting: Starting) -> None:
    """Load the silo's policy; what it allows is checked after the training step."""
    arguments = starting.silo
    if arguments.policy is not None:
        path = RunFolder(arguments.out).messages(arguments.name)
        starting.guard = guard_of(arguments.policy, arguments.name, path, kinds_needed(arguments.scenario))


def _data(starting: Starting) -> list[Outcome]:
    """Whether the data can be read, and how many items the silo trains on."""
    arguments, scenario = starting.silo, starting.run.scenario
    here = scenario.model_copy(update={"device": arguments.device or scenario.device})
    if scenario.data is None:
        run = arguments.run
        starting.site = SiteData.load(here, arguments.site, run.id, starting.progress, run.source.file)
        population = starting.site.alone(arguments.name)
    else:
        population = build_population(here, starting.progress, folder=arguments.data, pooled=arguments.run.pooled)
    silo = starting.loaded = Silo(arguments, population, noise=scenario.seed)
    unpaired = f" ({silo.facts.unpaired} more with one of them)" if silo.facts.unpaired else ""
    return [Outcome(Verdict.OK, f"{len(silo.dataset)} training items, {silo.facts.held}{unpaired}")]


def _fit(starting: Starting) -> list[Outcome] | None:
    """Whether the site's labels, words, widths and encoders fit those of the others; the data are not stated."""
    silo, facts = starting.silo.name, None if starting.status is None else starting.status.coordinator
    if starting.site is None:
        return None
    if facts is None or facts.format is None:
        detail = "nothing to compare with: no other site has stated its data, or the coordinator did not report it"
        return [Outcome(Verdict.SKIPPED, detail)]
    try:
        held, others = starting.site.statement[1], facts.format.payload()
    except FieldError as error:
        return [Outcome(Verdict.FAILED, f"the coordinator's answer cannot be used: {error}")]
    who = "the agreement" if facts.committed else "the other sites' data"
    if (wrong := difference(silo, held, who, others)) is not None:
        return [Outcome(Verdict.FAILED, wrong)]
    if (new := unknown_name(silo, held, others)) is None:
        return [Outcome(Verdict.OK, f"labels and inputs fit {who}")]
    if facts.committed:
        return [Outcome(Verdict.FAILED, f"{new}, which {who} lacks; leave such items or columns out")]
    return [Outcome(Verdict.OK, f"inputs fit {who}; {new}, which it lacks and the agreement will have")]


def _as_stated(starting: Starting) -> list[Outcome] | None:
    """Whether the data are those that this site's own log says it stated in this run, and that were not refused."""
    log, run = RunFolder(starting.silo.out).messages(starting.silo.name), starting.run.id
    if starting.site is None or not log.is_file():
        return None
    messages = [record for _, record in read_log(log) if isinstance(record, MessageRecord) and record.header.run == run]
    answered = [record for record in messages if record.header.kind in (Kind.STATEMENT, Kind.AGREEMENT, Kind.ERROR)]
    stated = [
        record
        for record, answer in zip_longest(answered, answered[1:])
        if record.header.kind is Kind.STATEMENT and (answer is None or answer.header.kind is not Kind.ERROR)
    ]
    if not stated:
        return None
    same = stated[-1].digests == [digest(payload) for payload in starting.site.statement]
    when = f"what {starting.silo.name} stated in this run at {stated[-1].wall}"
    if same:
        return [Outcome(Verdict.OK, f"the same as {when}")]
    facts = None if starting.status is None else starting.status.coordinator
    if facts is not None and not facts.committed:
        return [Outcome(Verdict.DIFFERS, f"other data than {when}, which the silo states anew: nothing is agreed yet")]
    return [Outcome(Verdict.FAILED, f"other data than {when} ({log}): the coordinator refuses other data than agreed")]


def _remarks(starting: Starting) -> list[Outcome]:
    return [Outcome(Verdict.WARNING, line) for line in starting.loaded.population.prepared.warnings]


def _items(starting: Starting) -> list[Outcome] | None:
    """Whether items are left out, as they lack an image or captions."""
    arguments = starting.silo
    own = None if arguments.site is None else arguments.site.data
    data = own if arguments.scenario.data is None else arguments.scenario.data
    extracted = starting.loaded.population.prepared.meta.source.get("weights") is not None
    lacking = left_out(data) if extracted and data is not None else ""
    return [Outcome(Verdict.WARNING, lacking)] if lacking else None


def _disk(starting: Starting) -> list[Outcome]:
    """Whether the disk has room for the silo's states and logs."""
    out = starting.silo.out.absolute()
    needed = _DISK_MODELS * starting.loaded.model.flat.nbytes + _LOG_BYTES
    place = next(path for path in (out, *out.parents) if path.exists())
    free = shutil.disk_usage(place).free
    detail = f"{size_text(free)} free at {place}, {size_text(needed)} needed"
    return [Outcome(Verdict.OK if free >= needed else Verdict.FAILED, detail)]


@dataclass(frozen=True)
class FirstStep:
    """One training step of a silo on its first batch, which is discarded."""

    protocol: FederatedProtocol  # the method, which trains for one epoch
    local: Local  # the silo with its first items
    task: Task
    steps: int  # number of steps of a whole task

    @classmethod
    def of(cls, silo: Silo) -> FirstStep:
        """The first step of a silo."""
        training = silo.context.training
        context = replace(silo.context, training=training.model_copy(update={"local_epochs": 1}))
        protocol, size = protocols.create(silo.scenario.protocol, context), min(training.batch_size, len(silo.dataset))
        initial = protocol.initial(silo.model.flat.detach().cpu().clone())
        options, payloads = silo.scenario.compression.model, protocol.task(initial, silo.facts)
        sent = tuple(updates.model_to_silos(payload, options) for payload in payloads)
        task = Task(1, 0, 0, training.rate_at(0, silo.scenario.schedule_rounds), sent)
        local = replace(silo.local({}), dataset=_first_items(silo.dataset, size), unpaired=())
        return cls(protocol, local, task, training.local_epochs * math.ceil(len(silo.dataset) / max(1, size)))

    def train(self) -> tuple[Trained, float]:
        """What the step returns, and the time that it takes [s]."""
        began = time.monotonic()
        return self.protocol.train(self.local, self.task), time.monotonic() - began


def sent_payloads(silo: Silo, trained: Trained) -> tuple[Payload, ...]:
    """The payloads of a reply without what the silo's modalities leave out."""
    sender = updating(silo.facts, silo.protocol.traits())
    return tuple(shortened(payload, silo.context.layout, sender) for payload in trained.payloads)


def _training_step(starting: Starting) -> list[Outcome]:
    """One training step: its time, and the reply that the policy has to allow."""
    silo = starting.loaded
    step = FirstStep.of(silo)
    try:
        trained, seconds = step.train()
    except Exception as error:
        return [Outcome(Verdict.FAILED, f"{type(error).__name__}: {error}")]
    sent = [silo.transform(payload, step.task) for payload in sent_payloads(silo, trained)]
    starting.reply, _ = silo.compress(sent, {})
    whole = seconds * step.steps
    task_seconds = "less than 0.1" if whole < 0.1 else f"at most about {whole:.1f}"
    detail = (
        f"{len(step.local.dataset)} items in {seconds:.2f} s on {silo.model.flat.device}: {task_seconds} s per task "
        f"of {counted(step.steps, 'step')} ({_loss(silo, trained.loss)})"
    )
    return [Outcome(Verdict.OK, detail)]


def _policy(starting: Starting) -> list[Outcome] | None:
    """Whether the policy allows what this silo states about its data and the reply to a task."""
    if starting.guard is None:
        return None
    stated = () if starting.site is None else starting.site.statement
    if broken := [*starting.guard.broken(stated), *starting.guard.broken(starting.reply)]:
        return [Outcome(Verdict.FAILED, f"the silo would not send {'; nor '.join(broken)}")]
    sizes = ", ".join(f"{payload.KIND} {tensor_text(tensor_bytes(payload))}" for payload in starting.reply)
    return [Outcome(Verdict.OK, f"allows the silo to join and to reply to a task ({sizes})")]


def _memory(starting: Starting) -> list[Outcome]:
    """The memory that is left after a training step."""
    free, used = psutil.virtual_memory().available, psutil.Process().memory_info().rss
    verdict = Verdict.OK if free >= _SPARE_MEMORY else Verdict.FAILED
    detail = f"{size_text(used)} used by this silo, {size_text(free)} still available"
    return [Outcome(verdict, detail)]


def _loss(silo: Silo, loss: float) -> str:
    """The loss in words; a silo of one modality may have none, as the loss is of pairs."""
    if loss or silo.facts.paired:
        return f"loss {loss:.4f}"
    return f"no loss of its own: {'image' if silo.facts.image else 'text'}-only"


def _first_items(dataset: SiloDataset, size: int) -> SiloDataset:
    """The first items of a dataset."""
    return replace(
        dataset,
        image=None if dataset.image is None else dataset.image[:size],
        text=None if dataset.text is None else dataset.text.of(slice(size)),
        captions=dataset.captions[:size],
        labels=None if dataset.labels is None else dataset.labels[:size],
        rows=dataset.rows[:size],
    )


_DATA = ("device", "data")
_POLICY = "change the policy file, or ask the coordinator's operator for another scenario"
_COORDINATOR_FIX = "start it, correct --connect, or have it accept this key: docs/howto/keys.md"
_NAME_FIX = "the name that the coordinator's operator has assigned"
_SITES_FIX = "agree with the other sites on labels and inputs: docs/howto/own_sites.md"
_STATED_FIX = "the data with which the run began; or a new run, with another --out"
_STEP_FIX = "fedmq data check FILE; a smaller training.batch_size"
_WITH_A_DEVICE = ~Program.COORDINATOR
_TRACKED = Program.SCENARIO | Program.CHECK | Program.COORDINATOR
#: All checks, and the programs that make them. Those of the scenario file were made when a program read the file.
CHECKS: tuple[Check[Starting], ...] = (
    *map(_of_scenario_file, SCENARIO),
    Check("name", _NAME_FIX, _name, programs=Program.SILO | Program.PREFLIGHT),
    Check("trackers", "install the package, or another track", _trackers, programs=_TRACKED),
    Check("versions", "", _versions),
    Check("keys", "fedmq keys init, or fedmq keys new; docs/howto/keys.md", _keys),
    Check("coordinator", _COORDINATOR_FIX, _coordinator),
    Check("coordinator's versions", "install the same versions on both machines", _same_versions),
    Check("policy", _POLICY, _readable_policy),
    Check("device", "another device, or a machine that has it", _device, programs=_WITH_A_DEVICE),
    Check("launcher", "launcher: local, or without this setting", _cluster, programs=Program.CHECK),
    Check("data of the run", "correct the key, or the data (fedmq data check FILE)", _run_data, programs=Program.CHECK),
    Check("data", "fedmq data check FILE lists all problems", _data, ("data on disk", "name", "device")),
    Check("fit with other sites", _SITES_FIX, _fit),
    Check("data as stated before", _STATED_FIX, _as_stated, _DATA),
    Check("remark", "nothing, if it is intended", _remarks, _DATA),
    Check("items", "complete them, or leave them out on purpose", _items, _DATA),
    Check("disk", "free space, or another --out", _disk, _DATA),
    Check("training step", _STEP_FIX, _training_step, _DATA),
    Check("policy", _POLICY, _policy, ("training step",)),
    Check("memory", "end other programs, or a smaller training.batch_size", _memory, ("training step",)),
)
