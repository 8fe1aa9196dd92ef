"""Fixed facts of a run, derived once from the scenario and its data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import ModuleType

import numpy as np
import torch

import protocols
from coordinator.participation import RoundsPlan, Trace, cohort_size, sampling_of, trace_of
from coordinator.round_events import Action, Send
from fedmq import seeds
from fedmq.config.privacy import Privacy
from fedmq.config.resolve import no_secure_sum
from fedmq.config.scenario import Scenario
from fedmq.config.sections import Cost
from fedmq.errors import InputError
from fedmq.federation import updates
from fedmq.federation.agreement import RunData
from fedmq.federation.faults import FaultSchedule, TaskOutcome
from fedmq.federation.noise import affordable_tasks, check_privacy
from fedmq.federation.protocol import Context, FederatedProtocol, SiloFacts, State, Traits
from fedmq.models.objective_registry import OBJECTIVES
from fedmq.profiling import span
from fedmq.runs.run_records import EvaluatedItems
from fedmq.storage.cache import file_digest
from fedmq.storage.logs import QUIET, Logger
from fedmq.storage.run_folder import RunFolder
from fedmq.text import print_line
from fedmq.wire.codec import MAX_BODY, MAX_BODY_HEADER
from fedmq.wire.fields import FieldError
from fedmq.wire.layout import MAX_ENTRIES
from fedmq.wire.messages import TaskInfo
from fedmq.wire.payloads import ClipNorm, Delta, Loss, PartialDelta, Payload
from protocols.parts.robust import LEAST
from protocols.parts.training import steps_per_task

#: Name of the value of a state that is the present norm of adaptive clipping.
CLIP_NORM = "clip_norm"


def clip_norm(state: State, privacy: Privacy) -> float:
    """The present norm to which updates are clipped, in a run with adaptive clipping."""
    return min(max(float(state.values.get(CLIP_NORM, privacy.clip_norm)), 1e-6), 1e6)


def slowdowns(cost: Cost, seed: int, silos: tuple[str, ...]) -> dict[str, float]:
    """Slowdown factor of each silo by its device class; 1 for silos without a class.

    Classes are first assigned the silos they name. Then each class in turn is assigned ``round(share * N)`` of the
    remaining silos, in an order drawn from the seed.
    """
    result = {silo: each.slowdown for each in cost.classes.values() for silo in each.silos}
    left = sorted((silo for silo in silos if silo not in result), key=lambda silo: seeds.derive(seed, "device", silo))
    for each in cost.classes.values():
        count = round(each.share * len(silos))
        result |= dict.fromkeys(left[:count], each.slowdown)
        left = left[count:]
    return {silo: result.get(silo, 1.0) for silo in silos}


@dataclass(frozen=True)
class CostModel:
    """Task durations from device classes, log-normal speeds within them, jitter per task, and a lossy link."""

    cost: Cost
    seed: int
    silos: tuple[str, ...]
    epochs: int  # local epochs per task
    down_bytes: int  # nominal size of a task [bytes]
    up_bytes: int  # nominal size of a reply [bytes]

    @cached_property
    def _slowdowns(self) -> dict[str, float]:
        return slowdowns(self.cost, self.seed, self.silos)

    @cached_property
    def speeds(self) -> dict[str, float]:
        """Slowdown factor of each silo; its median over the silos of a class is the slowdown of the class."""
        spreads = (
            seeds.numpy_generator(self.seed, "speed", silo).lognormal(0.0, self.cost.speed_sigma) for silo in self.silos
        )
        return {silo: self._slowdowns[silo] * float(spread) for silo, spread in zip(self.silos, spreads, strict=True)}

    def jitter(self, silo: str, sequence: int) -> float:
        """Random factor of this task's compute time; its median is 1."""
        generator = seeds.numpy_generator(self.seed, "jitter", silo, sequence)
        if self.cost.jitter == "pareto":
            # NumPy draws from the Lomax distribution, i.e. Pareto minus 1; the median of Pareto is 2^(1/tail).
            return float((1.0 + generator.pareto(self.cost.jitter_tail)) / 2 ** (1 / self.cost.jitter_tail))
        return float(generator.lognormal(0.0, self.cost.jitter_sigma))

    def duration(self, silo: str, sequence: int, samples: int) -> float:
        """Virtual time from sending a task to the arrival of its reply, by the silo's training samples [s]."""
        cost = self.cost
        compute = cost.seconds_per_sample * samples * self.epochs * self.speeds[silo] * self.jitter(silo, sequence)
        down = self.down_bytes / (cost.down_bandwidth or cost.bandwidth)
        up = self.up_bytes / (cost.up_bandwidth or cost.bandwidth)
        lost_down, lost_up = self._lost(silo, sequence)
        # A lost copy costs its transfer time and a round trip before it is sent again.
        resends = lost_down * (down + 2 * cost.latency) + lost_up * (up + 2 * cost.latency)
        return compute + 2 * cost.latency + down + up + resends

    def _lost(self, silo: str, sequence: int) -> tuple[int, int]:
        """Number of copies of the task and of its reply that are lost before one arrives."""
        if self.cost.loss == 0.0:
            return 0, 0
        down, up = seeds.numpy_generator(self.seed, "loss", silo, sequence).geometric(1.0 - self.cost.loss, 2) - 1
        return int(down), int(up)


@dataclass(frozen=True)
class RunContext:
    """Fixed facts of a run, as the coordinator's loop uses them."""

    scenario: Scenario
    protocol: FederatedProtocol
    context: Context
    # Training samples of each silo, in silo order: they bound what a reply may claim, weight the sampling by size, and
    # determine a task's duration in virtual time and its place in the order of tasks.
    samples: tuple[int, ...]
    cost: CostModel
    folder: RunFolder
    trace: Trace = field(default_factory=Trace)
    data: str = ""  # digest of the prepared data
    trace_file: str = ""  # digest of the file of ``trace``; empty if there is none
    pairs: tuple[int, ...] = ()  # items of the evaluated split with both modalities, of each silo
    evaluated: EvaluatedItems | None = None  # items of the evaluated split; None if only the evaluator knows them
    own_attributes: OwnAttributes = field(init=False, repr=False, compare=False)  # warns if the method changes them

    def __post_init__(self) -> None:
        object.__setattr__(self, "own_attributes", OwnAttributes(self.protocol))

    @cached_property
    def script(self) -> FaultSchedule:
        """The scenario's faults."""
        return FaultSchedule(self.scenario.faults, self.scenario.seed, self.context.silos)

    @cached_property
    def _silos(self) -> dict[str, SiloFacts]:
        return {silo.name: silo for silo in self.context.silos}

    def facts_at(self, name: str, version: int) -> SiloFacts:
        """Facts of a silo at a version; they change only by faults, e.g. a lost modality."""
        return self.script.facts(self._silos[name], version)

    @cached_property
    def plan(self) -> RoundsPlan:
        """The part of the scenario that the rounds machine needs."""
        silos, participation, aggregation = self.context.silos, self.scenario.participation, self.scenario.aggregation
        eligible = tuple(
            silo.name
            for silo in silos
            if any(self.protocol.eligible(state) for state in self.script.phases(silo, self.scenario.rounds))
        )
        samples = {silo.name: self.samples[silo.index] for silo in silos}
        counts = [samples[name] for name in eligible]
        tasks = affordable_tasks(self.scenario, sent_kinds(self), counts, self.scenario.rounds)
        secure = self.scenario.privacy.secure_aggregation
        patience = {"sync": aggregation.deadline, "buffered": aggregation.timeout, "async": None}
        return RoundsPlan(
            seed=self.scenario.seed,
            rounds=self.scenario.rounds,
            silos=tuple(silo.name for silo in silos),
            eligible=eligible,
            participation=participation.rate,
            sampling=sampling_of(participation, samples),
            mode=aggregation.mode,
            quorum=aggregation.quorum,
            over_select=aggregation.over_select,
            buffer=aggregation.buffer,
            patience=patience[aggregation.mode],
            max_staleness=aggregation.max_staleness,
            first_round_selects_all=self.traits.first_round_selects_all,
            minimum=participation.minimum,
            threshold=None if secure is None else secure.threshold,
            affordable=None if tasks is None else {name: tasks[samples[name]] for name in eligible},
        )

    @cached_property
    def traits(self) -> Traits:
        """The method's declared traits."""
        return self.protocol.traits()

    @cached_property
    def steps(self) -> dict[str, int]:
        """Optimiser steps per task, by name of each silo that the method can select."""
        counts = zip(self.context.silos, self.samples, strict=True)
        return {silo.name: steps_per_task(self.scenario, n) for silo, n in counts if silo.name in self.plan.eligible}

    @property
    def gives_up(self) -> bool:
        """Whether a silo that stays away is given up; by default only on a wall clock."""
        chosen = self.scenario.aggregation.on_lost
        return self.scenario.clock == "wall" if chosen is None else chosen == "give_up"

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The payloads of a silo's task from a state, as they are sent."""
        privacy, payloads = self.scenario.privacy, self.protocol.task(state, silo)
        if privacy.adaptive_clip is not None:
            payloads = (*payloads, ClipNorm(clip_norm(state, privacy)))
        return self.to_silos(payloads)

    def to_silos(self, payloads: Sequence[Payload]) -> tuple[Payload, ...]:
        """Payloads with the model compressed as the scenario says."""
        return tuple(updates.model_to_silos(each, self.scenario.compression.model) for each in payloads)

    def task_info(self, round_: int, committed: int) -> TaskInfo:
        """The description that a task carries; the silo may delete personal states before its task ``committed``."""
        rate = self.scenario.training.rate_at(round_, self.scenario.schedule_rounds)
        return TaskInfo(round=round_, rounds=self.scenario.rounds, committed=committed, learning_rate=rate)

    def outcome_at(self, silo: str, outcome: TaskOutcome) -> float:
        """Virtual time at which a task's outcome is known, considering the silo's availability [s]."""
        wait = self.scenario.participation.interrupted == "wait"
        on = self.trace.outcome_at(silo, outcome.issued_at, outcome.due, wait=wait)
        return on if outcome.sent else outcome.due

    def longest_first(self, actions: Sequence[Action]) -> list[Action]:
        """Reorder the tasks among the actions by decreasing work; other actions keep their places.

        Silos that share a machine train in the order in which tasks arrive; with the longest task last, a round would
        end with one silo training alone. The order affects nothing else.
        """
        work = {
            silo.name: samples * (1 + silo.paired)
            for silo, samples in zip(self.context.silos, self.samples, strict=True)
        }
        tasks = [action for action in actions if isinstance(action, Send)]
        tasks.sort(key=lambda task: -work[task.silo])
        waiting = iter(tasks)
        return [next(waiting) if isinstance(action, Send) else action for action in actions]


@span("start")
def run_context_of(scenario: Scenario, data: RunData, folder: RunFolder) -> tuple[RunContext, torch.Tensor]:
    """The fixed facts of a run, and the initial parameters (float32 [P]).

    Raises:
        InputError: the method, the data and the scenario's options do not fit together.
    """
    _check_labels(scenario, data)
    try:
        model = data.build_model(scenario, "cpu", ())
    except FieldError as error:
        found = f"bits {scenario.objective.bits}, hidden {scenario.objective.hidden}"
        raise InputError("objective", found, f"a network that can be sent: {error}") from None
    context = data.context(scenario, model)
    method = protocols.create(scenario.protocol, context)
    eligible = sum(map(method.eligible, data.silos))
    if not eligible:
        allowed = f"at least one silo that {scenario.protocol.label} can select"
        place = "missing_modality" if scenario.data is not None else "the silos' modalities"
        raise InputError(place, "no such silo", allowed)
    minimum = scenario.participation.minimum
    if minimum is not None and minimum > eligible:
        allowed = f"at most {eligible}, the silos that {scenario.protocol.label} can select"
        raise InputError("participation.minimum", minimum, allowed)
    context = replace(context, cohort=cohort_size(scenario.participation.rate, eligible))
    ways = scenario.compression.model, scenario.compression.updates
    down, up = (updates.nominal_bytes(model.layout, options) for options in ways)
    cost = CostModel(scenario.cost, scenario.seed, scenario.all_silo_names, scenario.training.local_epochs, down, up)
    trace = trace_of(scenario.participation, scenario.seed, scenario.all_silo_names)
    path = scenario.participation.trace
    digests = data.digest, "" if path is None else file_digest(path)
    method = protocols.create(scenario.protocol, context)
    split, counts = scenario.evaluation.split, data.evaluated
    samples, pairs = _samples(scenario, data, method), data.pairs(split)
    _check_own_galleries(scenario, data)
    evaluated = None if counts is None else EvaluatedItems(split=split, images=counts[0], captions=counts[1])
    run_context = RunContext(scenario, method, context, samples, cost, folder, trace, *digests, pairs, evaluated)
    if run_context.plan.wanted(1) < run_context.plan.cohort_size(1):  # the first round may select all silos
        context = replace(context, whole_rounds=False)
        method = protocols.create(scenario.protocol, context)
        run_context = replace(run_context, protocol=method, context=context)
    sent = sent_kinds(run_context)
    updates.check_uploads(scenario, sent, exact=method.traits().exact_updates)
    check_privacy(scenario, sent, [samples[silo.index] for silo in context.silos if method.eligible(silo)])
    if scenario.compression.model.kind != "none":
        state = method.initial(model.flat.detach().clone())
        updates.check_downloads(scenario, [method.task(state, silo) for silo in data.silos if method.eligible(silo)])
    if scenario.participation.kind == "power_of_choice" and not all(Loss in kinds for kinds in sent):
        allowed = f"uniform, by_data or availability: {scenario.protocol.label} reports no losses"
        raise InputError("participation.kind", "power_of_choice", allowed)
    check_robust(run_context)
    if scenario.privacy.secure_aggregation is not None:
        _check_sum(scenario, method)
    return run_context, model.flat.detach().clone()


def _check_sum(scenario: Scenario, method: FederatedProtocol) -> None:
    """Refuse secure aggregation with a method, or options of it, that need single updates."""
    if why := method.no_sum():
        raise no_secure_sum(scenario.protocol, why)
    if (sections := len(method.sum_layout().sizes)) > MAX_ENTRIES:
        found = f"with {sections} branches and class rows of {scenario.protocol.label}"
        raise InputError("privacy.secure_aggregation", found, f"at most {MAX_ENTRIES}")


def selectable(scenario: Scenario, data: RunData) -> tuple[str, ...]:
    """The silos that the method can select, by what they hold at the start of the run."""
    context = data.context(scenario, data.build_model(scenario, "cpu", ()))
    method = protocols.create(scenario.protocol, context)
    return tuple(silo.name for silo in data.silos if method.eligible(silo))


def _samples(scenario: Scenario, data: RunData, method: FederatedProtocol) -> tuple[int, ...]:
    """Number of items that each silo trains on; if faults change its modalities, the largest number."""
    script, unpaired = FaultSchedule(scenario.faults, scenario.seed, data.silos), method.traits().unpaired
    contrasts, samples = OBJECTIVES.find(scenario.objective.base).contrasts, list[int]()
    for silo in data.silos:
        found = {state: data.trained(state, unpaired) for state in script.phases(silo, scenario.rounds)}
        samples.append(max(found.values()))
        if not method.eligible(silo):
            continue
        for state in found:
            held = data.training_items(state).dataset
            if not held:
                what = "both modalities" if state.paired else "an image" if state.image else "captions"
                raise InputError(
                    "faults: modality_gained", f"{silo.name} without an item that has {what}", "other silos"
                )
        # A silo that lost a modality from the first round on never trains as it is described.
        if silo.paired and contrasts and found.get(silo) == 1:
            what = f"{silo.name} with a single pair, which has no negatives"
            raise InputError("partition.least", what, "2 or more, fewer silos, or more data")
    return tuple(samples)


def _check_own_galleries(scenario: Scenario, data: RunData) -> None:
    """Refuse a gallery of a silo's own that has a single pair, in which every model finds the right item."""
    pairs = data.pairs(scenario.evaluation.split)
    lone = [silo.name for silo, count in zip(data.silos, pairs, strict=True) if count == 1]
    if scenario.evaluation.silo_gallery == "own" and lone:
        found = f"own with {lone[0]}, whose gallery has a single pair, so R@1 is 1 for any model"
        raise InputError("evaluation.silo_gallery", found, "whole, fewer silos, or more held-out items")


def _check_labels(scenario: Scenario, data: RunData) -> None:
    """Refuse an objective base that needs labels if no training item has one."""
    base = scenario.objective.base
    if data.label_names and not data.labelled and OBJECTIVES.find(base).needs_labels:
        raise InputError("data", "training items without any label", f"labels, for objective.base {base}")


def sent_kinds(run_context: RunContext) -> list[frozenset[type[Payload]]]:
    """Payload kinds that each eligible silo uploads."""
    protocol, silos = run_context.protocol, run_context.context.silos
    return [protocol.uploads(silo) for silo in silos if protocol.eligible(silo)]


#: Lower bound of the largest accepted message body [bytes]; see :func:`largest_body`.
LEAST_BODY = 1 << 26
#: Maximum accepted body of a run whose silos have their own data, before the model is known [bytes].
_OWN_BODY = 1 << 28


def own_largest_body(scenario: Scenario) -> int:
    """Largest accepted message body [bytes] of a run whose model depends on what the silos state."""
    return MAX_BODY if scenario.backbone.end_to_end or scenario.backbone.adapter_site == "blocks" else _OWN_BODY


def largest_body(run_context: RunContext, least: int = LEAST_BODY) -> int:
    """Largest accepted message body [bytes]: four times the model, or the method's declared reply size if larger.

    Methods declare it where replies grow with something other than the model, e.g. representations with the public set.
    """
    tensors = run_context.traits.reply_bytes
    return max(least, 4 * run_context.context.layout.nbytes, tensors + MAX_BODY_HEADER)


def check_robust(run_context: RunContext) -> None:
    """Refuse a robust rule if merges regularly, not just occasionally, have too few replies to compare: less than
    three, or of less than three silos that train a modality's module.
    """
    robust, plan, protocol = run_context.scenario.aggregation.robust, run_context.plan, run_context.protocol
    judged = [silo for silo in run_context.context.silos if silo.name in plan.eligible]
    judged = [silo for silo in judged if protocol.uploads(silo) & {Delta, PartialDelta}]
    if robust.rule == "none" or (robust.rule == "norm_bound" and robust.bound is not None) or not judged:
        return
    allowed = f"at least {LEAST}, as with fewer no false one can be identified; or norm_bound with a bound"
    if (wanted := plan.wanted(1)) < LEAST:
        raise InputError(
            f"aggregation.robust.rule: {robust.rule}",
            f"merges of {wanted} {'reply' if wanted == 1 else 'replies'}",
            allowed,
        )
    for modality in ("image", "text"):
        silos = [silo.name for silo in judged if getattr(silo, modality)]
        if robust.rule in ("median", "trimmed_mean") and 0 < len(silos) < LEAST:
            what = "silo that trains" if len(silos) == 1 else "silos that train"
            found = f"{len(silos)} {what} {modality}: {', '.join(silos)}"
            raise InputError(f"aggregation.robust.rule: {robust.rule}", found, allowed)


#: A value that is compared by identity, and what differs if its content has changed.
_Leaf = tuple[object, object]


class OwnAttributes:
    """The attributes of a method as it was made, at the coordinator.

    Functions and frozen dataclasses are not looked into, and properties may be cached by ``cached_property``.
    """

    def __init__(self, method: FederatedProtocol) -> None:
        self._method, self._made = method, _attributes(method)
        self._told: set[str] = set()

    def warn_of_changes(self, logger: Logger) -> None:
        """Warn once of each attribute that has changed, in the log for operators, or without one on stderr."""
        now = _attributes(self._method)
        changed = {name for name in now if name not in self._made or not _same(now[name], self._made[name])}
        if new := sorted(changed - self._told):
            self._told |= changed
            line = (
                f"{type(self._method).__name__} changed {', '.join(f'self.{name}' for name in new)}, which no "
                "checkpoint contains: a run that is resumed gives another model; keep it in State.tensors or "
                "State.values (docs/howto/own_methods.md)"
            )
            logger.warning("method keeps values on itself", found=line)
            if logger is QUIET:
                print_line(f"warning: {line}", error=True)


def _attributes(method: object) -> dict[str, list[_Leaf]]:
    return {name: list(_leaves(value, {id(method)})) for name, value in _members(method).items()}


def _members(value: object) -> Mapping[str, object]:
    kind, members = type(value), vars(value)
    return {name: each for name, each in members.items() if not isinstance(getattr(kind, name, None), cached_property)}


def _same(one: list[_Leaf], other: list[_Leaf]) -> bool:
    return len(one) == len(other) and all(
        first is second and mark == old for (first, mark), (second, old) in zip(one, other, strict=True)
    )


def _leaves(value: object, seen: set[int]) -> Iterator[_Leaf]:
    """What a value consists of."""
    kind = type(value)
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes():
            yield kind, repr(value)  # NaN is equal to itself
        case torch.Tensor():
            yield value, value._version
        case np.ndarray():
            yield value, value.tobytes()
        case torch.Generator():
            yield value, value.get_state().numpy().tobytes()
        case np.random.Generator():
            yield value, repr(value.bit_generator.state)
        case _:
            parts = None if id(value) in seen else _parts(value)
            if parts is None:
                yield value, None
                return
            yield kind, None
            for name, each in parts:
                yield kind, repr(name)
                yield from _leaves(each, seen | {id(value)})


def _parts(value: object) -> Iterable[tuple[object, object]] | None:
    """What a value holds, by name; None if it is not looked into."""
    match value:
        case Mapping():
            return value.items()
        case Sequence() | Set():
            return enumerate(value)
    kind = type(value)
    frozen = dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    if frozen or isinstance(value, type | ModuleType) or not hasattr(value, "__dict__"):
        return None
    return _members(value).items()
