"""Checks before a silo joins a run, on this machine and against the coordinator's status.

They cover versions, keys, scenario, policy, the data and whether they fit those of the other sites, disk, memory, and
one training step, whose result is discarded.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import psutil
import torch

import protocols
from fedmq.audit.policy_guard import PolicyGuard, guard_of, kinds_needed
from fedmq.config.run_id import named
from fedmq.data.extract import left_out
from fedmq.data.silo_dataset import SiloDataset
from fedmq.errors import RemoteWireError
from fedmq.federation.agreement import difference, unknown_name
from fedmq.federation.participant import SiteData, Starting, check_device
from fedmq.federation.population import build_population
from fedmq.federation.preflight import Check, Outcome, Result, Verdict, results
from fedmq.federation.protocol import FederatedProtocol, Local, Task, Trained
from fedmq.packages import versions
from fedmq.runs.status import StatusFile, status_of
from fedmq.storage.run_folder import RunFolder
from fedmq.text import Progress, counted
from fedmq.wire.fields import FieldError
from fedmq.wire.handshake import Accepted, HelloRefusedError, complete, initiate
from fedmq.wire.inquiry import NoAnswerError, ask_status
from fedmq.wire.keys import Identity, fingerprint, load_accepted, load_identity, words
from fedmq.wire.messages import COORDINATOR, WIRE_VERSION, Reason
from fedmq.wire.payloads import Payload, tensor_bytes
from fedmq.wire.refusals import SAME_SCENARIO
from fedmq.wire.transports.curve_keys import ConnectionKeys
from fedmq.wire.transports.registry import connect
from fedmq.wire.transports.tcp import unknown_host
from protocols.parts.missing_branch import shortened
from silos.tasks import Silo, SiloArguments

#: Disk space that a silo's states need, in model sizes: two states of up to two models each, and a snapshot of four.
_DISK_MODELS = 8


@dataclass(frozen=True)
class Limits:
    """Limits of the checks.

    Args:
        answer_seconds: time to wait for the coordinator's answer [s].
        log_bytes: disk space for logs [bytes].
        spare_memory: free memory that should remain after a training step [bytes].
    """

    answer_seconds: float = 5.0
    log_bytes: float = 50e6
    spare_memory: float = 200e6


_DEFAULTS = Limits()


@dataclass
class Joining:
    """A silo that is about to join, and what the checks have learned.

    Args:
        arguments: the arguments with which the silo will be started.
        progress: called with (what, done, total) while features are extracted.
        limits: limits of the checks.

    Attributes:
        keys: its identity and the accepted public keys; None without usable ones.
        status: the coordinator's status, if it answers.
        guard: its policy, if it has one that can be read.
        site: the data of a site with its own data.
        silo: the silo with its data.
        reply: payloads of the reply to one training step.
    """

    arguments: SiloArguments
    progress: Progress | None
    limits: Limits
    keys: tuple[Identity, Accepted] | None = None
    status: StatusFile | None = None
    guard: PolicyGuard | None = None
    site: SiteData | None = None
    silo: Silo | None = None
    reply: tuple[Payload, ...] = ()

    @property
    def loaded(self) -> Silo:
        """The silo, after the check of its data."""
        assert self.silo is not None  # noqa: S101
        return self.silo


def preflight(
    arguments: SiloArguments, progress: Progress | None = None, limits: Limits = _DEFAULTS
) -> Iterator[Result]:
    """Run all checks, one after the other; no update is sent, and only the cache is written.

    Args:
        arguments: the arguments with which the silo will be started.
        progress: called with (what, done, total) while features are extracted.
        limits: limits of the checks.
    """
    torch.set_num_threads(1)
    yield from results(CHECKS, Joining(arguments, progress, limits))


# --- keys and coordinator -------------------------------------------------------------------------------------------
def _versions(joining: Joining) -> list[Outcome]:
    here = ", ".join(f"{name} {version}" for name, version in versions().items())
    detail = f"{here}, wire {WIRE_VERSION}; run {joining.arguments.run.id}"
    return [Outcome(Verdict.OK, detail)]


def _keys(joining: Joining) -> list[Outcome]:
    folder, name = joining.arguments.keys, joining.arguments.name
    identity, accepted = load_identity(folder, name), load_accepted(folder)
    if COORDINATOR not in accepted:
        raise RemoteWireError("unknown_sender", f"no public key of the coordinator in {folder}/accepted")
    joining.keys = identity, accepted
    return [Outcome(Verdict.OK, f"{name} has the key {fingerprint(identity)}: {words(identity)}")]


def _coordinator(joining: Joining) -> list[Outcome]:
    """Whether the coordinator answers and accepts the silo; without usable keys, whether its name is known here.

    The inquiry neither joins the run nor ends a session of the silo.
    """
    uri = joining.arguments.connect
    if joining.keys is None:
        if host := unknown_host(uri):
            return [Outcome(Verdict.FAILED, f"{uri}: the name {host} is unknown on this machine")]
        return [Outcome(Verdict.SKIPPED, f"{uri} is not asked without both keys")]
    try:
        joining.status = status_of(ask_status(uri, *joining.keys, joining.limits.answer_seconds))
    except NoAnswerError as error:
        return [Outcome(Verdict.SKIPPED, f"{error}; key, scenario and versions are not compared")]
    return [_handshake(joining, *joining.keys)]


def _same_versions(joining: Joining) -> list[Outcome] | None:
    """Whether the coordinator runs the same versions as this process, as the last bits of a model depend on them."""
    if joining.status is None or joining.status.coordinator is None:
        return None
    here, there = versions(), joining.status.coordinator.versions
    pairs = [(name, there.get(name, mine), mine) for name, mine in here.items()]
    if other := [f"{name} {theirs} there, {mine} here" for name, theirs, mine in pairs if theirs != mine]:
        return [Outcome(Verdict.DIFFERS, f"{', '.join(other)}: the silo can join; last bits of models may differ")]
    return [Outcome(Verdict.OK, ", ".join(f"{name} {here[name]}" for name in here))]


def _handshake(joining: Joining, identity: Identity, accepted: Accepted) -> Outcome:
    """Whether the coordinator accepts the key, the run and a wire version; no session is opened."""
    arguments, status, uri = joining.arguments, joining.status, joining.arguments.connect
    connection = connect(uri, keys=ConnectionKeys(identity.key, accepted[COORDINATOR], identity.name))
    try:
        hello, initiated = initiate(identity, COORDINATOR, arguments.run.id, 0.0, options=arguments.scenario.wire)
        connection.send(hello)
        frames = connection.receive(joining.limits.answer_seconds)
        if frames is None:
            within = f"within {joining.limits.answer_seconds:.0f} s"
            return Outcome(Verdict.SKIPPED, f"no answer from {uri} {within}: not started, or it does not know this key")
        complete(initiated, accepted, frames, 0.0)
    except HelloRefusedError as error:
        if error.reason == Reason.WRONG_RUN and status is not None:
            which = _differing(arguments, status)
            detail = f"it runs another scenario: {status.run}, here {arguments.run.id}{which}; {SAME_SCENARIO}"
            return Outcome(Verdict.FAILED, detail)
        return Outcome(Verdict.FAILED, f"it refuses this silo: {error.reason}: {error.detail}")
    except RemoteWireError as error:
        return Outcome(Verdict.FAILED, f"its answer cannot be used: {error.reason}: {error.detail}")
    finally:
        connection.close()
    so_far = "" if status is None else f"; {status.phase}, round {status.round} of {status.rounds}"
    detail = f"accepts this key, this scenario ({arguments.run.id}) and wire version {WIRE_VERSION}{so_far}"
    return Outcome(Verdict.OK, detail)


def _differing(arguments: SiloArguments, status: StatusFile) -> str:
    """The keys that differ from the coordinator's scenario, if it tells."""
    facts = status.coordinator
    if facts is None or facts.scenario is None:
        return ""
    keys = facts.scenario.differing(arguments.scenario.model_dump(mode="json"))
    return f", with other values of {named(keys)}" if keys else ""


# --- the silo -------------------------------------------------------------------------------------------------------
def _readable_policy(joining: Joining) -> None:
    """Load the silo's policy; what it allows is checked after the training step."""
    arguments = joining.arguments
    if arguments.policy is not None:
        path = RunFolder(arguments.out).messages(arguments.name)
        joining.guard = guard_of(arguments.policy, arguments.name, path, kinds_needed(arguments.scenario))


def _device(joining: Joining) -> None:
    arguments = joining.arguments
    check_device(Starting(arguments.name, arguments.device, arguments.scenario, arguments.site))


def _data(joining: Joining) -> list[Outcome]:
    """Whether the data can be read, and how many items the silo trains on."""
    arguments, scenario = joining.arguments, joining.arguments.scenario
    here = scenario.model_copy(update={"device": arguments.device or scenario.device})
    if scenario.data is None:
        run = arguments.run
        joining.site = SiteData.load(here, arguments.site, run.id, joining.progress, run.source.file)
        population = joining.site.alone(arguments.name)
    else:
        population = build_population(here, joining.progress, folder=arguments.data, pooled=arguments.run.pooled)
    silo = joining.silo = Silo(arguments, population, noise=scenario.seed)
    unpaired = f" ({silo.facts.unpaired} more with one of them)" if silo.facts.unpaired else ""
    return [Outcome(Verdict.OK, f"{len(silo.dataset)} training items, {silo.facts.held}{unpaired}")]


def _fit(joining: Joining) -> list[Outcome] | None:
    """Whether the site's labels, words, widths and encoders fit those of the others; the data are not stated."""
    silo, facts = joining.arguments.name, None if joining.status is None else joining.status.coordinator
    if joining.site is None:
        return None
    if facts is None or facts.format is None:
        detail = "nothing to compare with: no other site has stated its data, or the coordinator did not report it"
        return [Outcome(Verdict.SKIPPED, detail)]
    try:
        held, others = joining.site.statement[1], facts.format.payload()
    except FieldError as error:
        return [Outcome(Verdict.FAILED, f"the coordinator's answer cannot be used: {error}")]
    who = "the agreement" if facts.settled else "the other sites' data"
    if (wrong := difference(silo, held, who, others)) is not None:
        return [Outcome(Verdict.FAILED, wrong)]
    if (new := unknown_name(silo, held, others)) is None:
        return [Outcome(Verdict.OK, f"labels and inputs fit {who}")]
    if facts.settled:
        return [Outcome(Verdict.FAILED, f"{new}, which {who} lacks; leave such items or columns out")]
    return [Outcome(Verdict.OK, f"inputs fit {who}; {new}, which it lacks and the agreement will have")]


def _remarks(joining: Joining) -> list[Outcome]:
    return [Outcome(Verdict.WARNING, line) for line in joining.loaded.population.prepared.warnings]


def _items(joining: Joining) -> list[Outcome] | None:
    """Whether items are left out, as they lack an image or captions."""
    arguments = joining.arguments
    own = None if arguments.site is None else arguments.site.data
    data = own if arguments.scenario.data is None else arguments.scenario.data
    extracted = joining.loaded.population.prepared.meta.source.get("weights") is not None
    lacking = left_out(data) if extracted and data is not None else ""
    return [Outcome(Verdict.WARNING, lacking)] if lacking else None


def _disk(joining: Joining) -> list[Outcome]:
    """Whether the disk has room for the silo's states and logs."""
    out = joining.arguments.out.absolute()
    needed = _DISK_MODELS * joining.loaded.model.flat.nbytes + joining.limits.log_bytes
    place = next(path for path in (out, *out.parents) if path.exists())
    free = shutil.disk_usage(place).free
    detail = f"{free / 1e6:,.0f} MB free at {place}, {needed / 1e6:,.0f} MB needed"
    return [Outcome(Verdict.OK if free >= needed else Verdict.FAILED, detail)]


@dataclass(frozen=True)
class FirstStep:
    """One training step of a silo on its first batch, which is discarded.

    Args:
        protocol: the method, which trains for one epoch.
        local: the silo with its first items.
        task: the task.
        steps: number of steps of a whole task.
    """

    protocol: FederatedProtocol
    local: Local
    task: Task
    steps: int

    @classmethod
    def of(cls, silo: Silo) -> FirstStep:
        """The first step of a silo."""
        training = silo.context.training
        context = replace(silo.context, training=training.model_copy(update={"local_epochs": 1}))
        protocol, size = protocols.create(silo.scenario.protocol, context), min(training.batch_size, len(silo.dataset))
        initial = protocol.initial(silo.model.flat.detach().cpu().clone())
        task = Task(1, 0, 0, training.rate_at(0, silo.scenario.schedule_rounds), protocol.task(initial, silo.facts))
        local = replace(silo.local({}), dataset=_first_items(silo.dataset, size), unpaired=())
        return cls(protocol, local, task, training.local_epochs * math.ceil(len(silo.dataset) / max(1, size)))

    def train(self) -> tuple[Trained, float]:
        """What the step returns, and the time that it takes [s]."""
        began = time.monotonic()
        return self.protocol.train(self.local, self.task), time.monotonic() - began


def sent_payloads(silo: Silo, trained: Trained) -> tuple[Payload, ...]:
    """The payloads of a reply without what the silo's modalities leave out."""
    return tuple(shortened(payload, silo.context.layout, silo.facts) for payload in trained.payloads)


def _training_step(joining: Joining) -> list[Outcome]:
    """One training step: its time, and the reply that the policy has to allow."""
    silo = joining.loaded
    step = FirstStep.of(silo)
    try:
        trained, seconds = step.train()
    except Exception as error:
        return [Outcome(Verdict.FAILED, f"{type(error).__name__}: {error}")]
    joining.reply = tuple(silo.transform(payload, step.task) for payload in sent_payloads(silo, trained))
    whole = seconds * step.steps
    task_seconds = "less than 0.1" if whole < 0.1 else f"at most about {whole:.1f}"
    detail = (
        f"{len(step.local.dataset)} items in {seconds:.2f} s on {silo.model.flat.device}: {task_seconds} s per task "
        f"of {counted(step.steps, 'step')} ({_loss(silo, trained.loss)})"
    )
    return [Outcome(Verdict.OK, detail)]


def _policy(joining: Joining) -> list[Outcome] | None:
    """Whether the policy allows what this silo states about its data and the reply to a task."""
    if joining.guard is None:
        return None
    stated = () if joining.site is None else joining.site.statement
    if broken := [*joining.guard.broken(stated), *joining.guard.broken(joining.reply)]:
        return [Outcome(Verdict.FAILED, f"the silo would not send {'; nor '.join(broken)}")]
    sizes = ", ".join(f"{payload.KIND} {tensor_bytes(payload):,}" for payload in joining.reply)
    return [Outcome(Verdict.OK, f"allows the silo to join and to reply to a task (bytes: {sizes})")]


def _memory(joining: Joining) -> list[Outcome]:
    """The memory that is left after a training step."""
    free, used = psutil.virtual_memory().available, psutil.Process().memory_info().rss
    verdict = Verdict.OK if free >= joining.limits.spare_memory else Verdict.FAILED
    detail = f"{used / 1e6:,.0f} MB used by this silo, {free / 1e6:,.0f} MB still available"
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


_POLICY = "change the policy file, or ask the coordinator's operator for another scenario"
#: Everything that is checked before a silo joins a run.
CHECKS: tuple[Check[Joining], ...] = (
    Check("versions", "", _versions),
    Check("keys", "fedmq keys init, or fedmq keys new; docs/howto/keys.md", _keys),
    Check("coordinator", "start it, correct --connect, or have it accept this key: docs/howto/keys.md", _coordinator),
    Check("coordinator's versions", "install the same versions on both machines", _same_versions),
    Check("policy", _POLICY, _readable_policy),
    Check("device", "another --device, or a machine that has it", _device),
    Check("data", "fedmq data check FILE lists all problems", _data, ("device",)),
    Check("fit with other sites", "agree with the other sites on labels and inputs: docs/howto/own_sites.md", _fit),
    Check("remark", "nothing, if it is intended", _remarks, ("device", "data")),
    Check("items", "complete them, or leave them out on purpose", _items, ("device", "data")),
    Check("disk", "free space, or another --out", _disk, ("device", "data")),
    Check("training step", "fedmq data check FILE; a smaller training.batch_size", _training_step, ("device", "data")),
    Check("policy", _POLICY, _policy, ("training step",)),
    Check("memory", "end other programs, or a smaller training.batch_size", _memory, ("training step",)),
)
