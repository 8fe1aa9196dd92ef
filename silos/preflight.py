"""Checks before a silo joins a run, on this machine and against the coordinator's status.

They cover keys, policy, scenario, versions, data and whether these fit the other sites', disk, memory, and one training
step, which is discarded.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import psutil
import torch

import protocols
from fedmq.audit.policy_guard import PolicyGuard, guard_of, kinds_needed
from fedmq.config.run_id import named
from fedmq.config.scenario import Scenario
from fedmq.data.extract import left_out
from fedmq.data.silo_dataset import SiloDataset
from fedmq.errors import FedmqError, InputError, RemoteWireError, RunError
from fedmq.federation.agreement import difference, unknown_name
from fedmq.federation.participant import SiteData
from fedmq.federation.population import build_population
from fedmq.federation.protocol import Task
from fedmq.packages import versions
from fedmq.runs.status import StatusFile, status_of
from fedmq.storage.run_folder import RunFolder
from fedmq.text import Progress, counted
from fedmq.wire.connection_troubles import SAME_SCENARIO
from fedmq.wire.fields import FieldError
from fedmq.wire.handshake import Accepted, HelloRefusedError, complete, initiate
from fedmq.wire.inquiry import NoAnswerError, UnknownHostError, ask_status
from fedmq.wire.keys import Identity, fingerprint, load_accepted, load_identity, words
from fedmq.wire.messages import COORDINATOR, WIRE_VERSION, Reason
from fedmq.wire.payloads import Payload, tensor_bytes
from fedmq.wire.transports.curve_keys import ConnectionKeys
from fedmq.wire.transports.registry import connect
from fedmq.wire.transports.tcp import unknown_host
from protocols.parts.missing_branch import shortened
from silos.program import Silo, SiloArguments
from silos.start_checks import check_device

#: Disk space that a silo's states need, in model sizes: two states of up to two models each, and a snapshot of four.
_DISK_MODELS = 8


class Verdict(StrEnum):
    """Result of a check."""

    OK = "ok"
    DIFFERS = "differs"  # the silo can join, but the reader should know
    WARNING = "warning"  # it can join, and its data have fewer usable items or other content than intended
    SKIPPED = "skipped"  # not possible, e.g. because the coordinator is not running yet
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    """A check.

    Args:
        name: what was checked.
        verdict: its result.
        detail: one line for a reader.
    """

    name: str
    verdict: Verdict
    detail: str


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


def preflight(
    arguments: SiloArguments, progress: Progress | None = None, limits: Limits = _DEFAULTS
) -> Iterator[Check]:
    """Make all checks, one after the other; nothing is trained or sent, and only the cache is written.

    Args:
        arguments: the arguments with which the silo will be started.
        progress: called with (what, done, total) while features are extracted.
        limits: limits of the checks.
    """
    status: StatusFile | None = None
    torch.set_num_threads(1)
    here = ", ".join(f"{name} {each}" for name, each in versions().items())
    detail = f"{here}, wire {WIRE_VERSION}; run {arguments.run.id}"
    yield Check("versions", Verdict.OK, detail)
    try:
        identity, accepted = load_identity(arguments.keys, arguments.name), load_accepted(arguments.keys)
        if COORDINATOR not in accepted:
            raise RemoteWireError("unknown_sender", f"no public key of the coordinator in {arguments.keys}/accepted")
    except FedmqError as error:
        yield Check("keys", Verdict.FAILED, str(error))
        yield _without_key(arguments)
    else:
        yield Check("keys", Verdict.OK, f"{arguments.name} has the key {fingerprint(identity)}: {words(identity)}")
        status, unanswered = _asked(arguments, identity, accepted, limits)
        yield unanswered or _handshake(arguments, identity, accepted, status, limits)
        if status is not None and status.coordinator is not None:
            yield _same_versions(status.coordinator.versions)
    guard = None
    if arguments.policy is not None:
        path = RunFolder(arguments.out).messages(arguments.name)
        try:
            guard = guard_of(arguments.policy, arguments.name, path, kinds_needed(arguments.scenario))
        except FedmqError as error:
            yield Check("policy", Verdict.FAILED, str(error))
    try:
        check_device(arguments.device, arguments.scenario.device, arguments.site)
    except InputError as error:
        yield Check("device", Verdict.FAILED, str(error))
        return
    try:
        site = _site(arguments, progress)
        if site is not None:
            yield _fit(arguments.name, site, status)
        silo = _silo(arguments, site, progress)
    except FedmqError as error:
        yield Check("data", Verdict.FAILED, str(error))
        return
    held = "images and captions" if silo.facts.paired else "images only" if silo.facts.image else "captions only"
    unpaired = f" ({silo.facts.unpaired} more with one of them)" if silo.facts.unpaired else ""
    yield Check("data", Verdict.OK, f"{len(silo.dataset)} training items, {held}{unpaired}")
    for line in silo.population.prepared.warnings:
        yield Check("remark", Verdict.WARNING, line)
    if lacking := _left_out(arguments, silo):
        yield Check("items", Verdict.WARNING, lacking)
    yield _disk(arguments, silo, limits)
    yield from _step(silo, limits, guard, site)


def _without_key(arguments: SiloArguments) -> Check:
    """What can be said about the coordinator without a usable key: whether its name is known here."""
    if host := unknown_host(arguments.connect):
        detail = f"{arguments.connect}: the name {host} is unknown on this machine"
        return Check("coordinator", Verdict.FAILED, detail)
    return Check("coordinator", Verdict.SKIPPED, f"{arguments.connect} is not asked without both keys")


def _left_out(arguments: SiloArguments, silo: Silo) -> str:
    """One line on the items that are left out, as they lack a picture or captions."""
    own = None if arguments.site is None else arguments.site.data
    data = own if arguments.scenario.data is None else arguments.scenario.data
    extracted = silo.population.prepared.meta.source.get("weights") is not None
    return left_out(data) if extracted and data is not None else ""


def _site(arguments: SiloArguments, progress: Progress | None) -> SiteData | None:
    """The data of a site with its own data; None in a simulated partition."""
    if arguments.scenario.data is not None:
        return None
    return SiteData.load(_here(arguments), arguments.site, arguments.run.id, progress, arguments.run.source.file)


def _here(arguments: SiloArguments) -> Scenario:
    return arguments.scenario.model_copy(update={"device": arguments.device or arguments.scenario.device})


def _silo(arguments: SiloArguments, site: SiteData | None, progress: Progress | None) -> Silo:
    if site is not None:
        return Silo(arguments, site.alone(arguments.name), noise=arguments.scenario.seed)
    population = build_population(_here(arguments), progress, folder=arguments.data, pooled=arguments.run.pooled)
    return Silo(arguments, population, noise=arguments.scenario.seed)


def _asked(
    arguments: SiloArguments, identity: Identity, accepted: Accepted, limits: Limits
) -> tuple[StatusFile | None, Check | None]:
    """The coordinator's status, or the check to report if there is none.

    The inquiry neither joins the run nor ends a session of the silo.
    """
    name = "coordinator"
    try:
        return status_of(ask_status(arguments.connect, identity, accepted, limits.answer_seconds)), None
    except UnknownHostError as error:
        return None, Check(name, Verdict.FAILED, str(error))
    except NoAnswerError as error:
        return None, Check(name, Verdict.SKIPPED, f"{error}; key, scenario and versions are not compared")
    except InputError as error:
        return None, Check(name, Verdict.FAILED, str(error))
    except RunError:
        return None, None  # a release that does not answer inquiries; the handshake tells more


def _same_versions(there: Mapping[str, str]) -> Check:
    """Whether the coordinator runs the same versions as this process, as the last bits of a model depend on them."""
    here = versions()
    pairs = [(name, there.get(name, mine), mine) for name, mine in here.items()]
    other = [f"{name} {theirs} there, {mine} here" for name, theirs, mine in pairs if theirs != mine]
    if other:
        detail = f"{', '.join(other)}: the silo can join; last bits of models may differ"
        return Check("coordinator's versions", Verdict.DIFFERS, detail)
    return Check("coordinator's versions", Verdict.OK, ", ".join(f"{name} {here[name]}" for name in here))


def _fit(silo: str, site: SiteData, status: StatusFile | None) -> Check:
    """Whether the site's labels, words, widths and encoders fit those of the others; the data are not stated."""
    name, facts = "fit with other sites", None if status is None else status.coordinator
    if facts is None or facts.format is None:
        detail = "nothing to compare with: no other site has stated its data, or the coordinator did not report it"
        return Check(name, Verdict.SKIPPED, detail)
    try:
        held, others = site.statement[1], facts.format.payload()
    except FieldError as error:
        return Check(name, Verdict.FAILED, f"the coordinator's answer cannot be used: {error}")
    who = "the agreement" if facts.settled else "the other sites' data"
    if (wrong := difference(silo, held, who, others)) is not None:
        return Check(name, Verdict.FAILED, wrong)
    if (new := unknown_name(silo, held, others)) is None:
        return Check(name, Verdict.OK, f"labels and inputs fit {who}")
    if facts.settled:
        return Check(name, Verdict.FAILED, f"{new}, which {who} lacks; leave such items or columns out")
    return Check(name, Verdict.OK, f"inputs fit {who}; {new}, which it lacks and the agreement will have")


def _handshake(
    arguments: SiloArguments, identity: Identity, accepted: Accepted, status: StatusFile | None, limits: Limits
) -> Check:
    """Whether the coordinator accepts the key, the run and a wire version; no session is opened."""
    name, uri = "coordinator", arguments.connect
    connection = connect(uri, keys=ConnectionKeys(identity.key, accepted[COORDINATOR], identity.name))
    try:
        hello, initiated = initiate(identity, COORDINATOR, arguments.run.id, 0.0, options=arguments.scenario.wire)
        connection.send(hello)
        frames = connection.receive(limits.answer_seconds)
        if frames is None:
            within = f"within {limits.answer_seconds:.0f} s"
            detail = f"no answer from {uri} {within}: not started, or it does not know this key"
            return Check(name, Verdict.SKIPPED, detail)
        complete(initiated, accepted, frames, 0.0)
    except HelloRefusedError as error:
        if error.reason == Reason.WRONG_RUN and status is not None:
            which = _differing(arguments, status)
            detail = f"it runs another scenario: {status.run}, here {arguments.run.id}{which}; {SAME_SCENARIO}"
            return Check(name, Verdict.FAILED, detail)
        return Check(name, Verdict.FAILED, f"it refuses this silo: {error.reason}: {error.detail}")
    except RemoteWireError as error:
        return Check(name, Verdict.FAILED, f"its answer cannot be used: {error.reason}: {error.detail}")
    finally:
        connection.close()
    so_far = "" if status is None else f"; {status.phase}, round {status.round} of {status.rounds}"
    detail = f"accepts this key, this scenario ({arguments.run.id}) and wire version {WIRE_VERSION}{so_far}"
    return Check(name, Verdict.OK, detail)


def _differing(arguments: SiloArguments, status: StatusFile) -> str:
    """The keys that differ from the coordinator's scenario, if it tells."""
    facts = status.coordinator
    if facts is None or facts.scenario is None:
        return ""
    keys = facts.scenario.differing(arguments.scenario.model_dump(mode="json"))
    return f", with other values of {named(keys)}" if keys else ""


def _disk(arguments: SiloArguments, silo: Silo, limits: Limits) -> Check:
    """Whether the disk has room for the silo's states and logs."""
    needed = _DISK_MODELS * silo.model.flat.nbytes + limits.log_bytes
    place = next(path for path in (arguments.out.absolute(), *arguments.out.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    detail = f"{free / 1e6:,.0f} MB free at {place}, {needed / 1e6:,.0f} MB needed"
    return Check("disk", Verdict.OK if free >= needed else Verdict.FAILED, detail)


def _step(silo: Silo, limits: Limits, guard: PolicyGuard | None, site: SiteData | None) -> Iterator[Check]:
    """One training step on the first batch, which is discarded: its time, its reply's size, the memory that is left."""
    training = silo.context.training
    context = replace(silo.context, training=training.model_copy(update={"local_epochs": 1}))
    protocol, size = protocols.create(silo.scenario.protocol, context), min(training.batch_size, len(silo.dataset))
    initial = protocol.initial(silo.model.flat.detach().cpu().clone())
    task = Task(1, 0, 0, training.rate_at(0, silo.scenario.schedule_rounds), protocol.task(initial, silo.facts))
    local = replace(silo.local({}), dataset=first_items(silo.dataset, size), unpaired=())
    began = time.monotonic()
    try:
        trained = protocol.train(local, task)
    except Exception as error:
        yield Check("training step", Verdict.FAILED, f"{type(error).__name__}: {error}")
        return
    seconds = time.monotonic() - began
    if guard is not None:
        sent = tuple(shortened(payload, silo.context.layout, silo.facts) for payload in trained.payloads)
        yield _policy(guard, tuple(silo.transform(payload, task) for payload in sent), site)
    steps = training.local_epochs * -(-len(silo.dataset) // max(1, size))
    task_seconds = "less than 0.1" if seconds * steps < 0.1 else f"at most about {seconds * steps:.1f}"
    detail = (
        f"{size} items in {seconds:.2f} s on {silo.model.flat.device}: {task_seconds} s per task "
        f"of {counted(steps, 'step')} ({_loss(silo, trained.loss)})"
    )
    yield Check("training step", Verdict.OK, detail)
    free, used = psutil.virtual_memory().available, psutil.Process().memory_info().rss
    verdict = Verdict.OK if free >= limits.spare_memory else Verdict.FAILED
    yield Check("memory", verdict, f"{used / 1e6:,.0f} MB used by this silo, {free / 1e6:,.0f} MB still available")


def _policy(guard: PolicyGuard, reply: tuple[Payload, ...], site: SiteData | None) -> Check:
    """Whether the policy allows what this silo states about its data and the reply to a task."""
    broken = [*guard.broken(() if site is None else site.statement), *guard.broken(reply)]
    if broken:
        return Check("policy", Verdict.FAILED, f"the silo would not send {'; nor '.join(broken)}")
    sizes = ", ".join(f"{each.KIND} {tensor_bytes(each):,}" for each in reply)
    return Check("policy", Verdict.OK, f"allows the silo to join and to reply to a task (bytes: {sizes})")


def _loss(silo: Silo, loss: float) -> str:
    """The loss in words; a silo of one modality may have none, as the loss is of pairs."""
    if loss or silo.facts.paired:
        return f"loss {loss:.4f}"
    return f"no loss of its own: {'image' if silo.facts.image else 'text'}-only"


def first_items(dataset: SiloDataset, size: int) -> SiloDataset:
    """The first items of a dataset."""
    return replace(
        dataset,
        image=None if dataset.image is None else dataset.image[:size],
        text=None if dataset.text is None else dataset.text.of(slice(size)),
        captions=dataset.captions[:size],
        labels=None if dataset.labels is None else dataset.labels[:size],
        rows=dataset.rows[:size],
    )
