"""The first rounds of a run, carried out in this process and discarded: their cost, and settings without effect.

Nothing is sent, and what is written goes to a temporary folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import partial
from pathlib import Path

import numpy as np
import torch

import protocols
from coordinator import checkpoints
from coordinator.participation import cohort_size
from coordinator.peers import InProcessPeers, PeerFunction, PeerFunctions
from coordinator.program import CoordinatorArguments, run_coordinator
from fedmq.config.resolve import ResolvedRun, resolve
from fedmq.config.scenario import ProtocolChoice, Scenario
from fedmq.errors import FedmqError, InputError
from fedmq.federation.population import I64, Parts, Population
from fedmq.launch.supervisor import inline_peers
from fedmq.runs.results import ONE_STEP_TASKS
from fedmq.runs.status import Status
from fedmq.storage.run_folder import RunFolder, bytes_of, load_aligned
from fedmq.text import counted, first_few
from fedmq.wire.codec import digest
from fedmq.wire.messages import Kind, Message
from fedmq.wire.payloads import Payload, RouterSums, tensor_bytes
from protocols.parts.training import steps_per_task

#: Maximum number of merges of a rehearsal; the time after which it ends if it has merged something, and the time after
#: which it ends at the next task in any case [s].
_MERGES, _ENOUGH_SECONDS, _MOST_SECONDS = 3, 1.0, 15.0
#: Number of queries, and of gallery items, to which a rehearsal reduces a larger split; fewer for a comparison of
#: options, which estimates no times.
_EVALUATED, _COMPARED = 1000, 100
#: Merges of a comparison at least: SCAFFOLD's first one is FedAvg's, because all control variates are 0 until then.
_COMPARED_MERGES = 2
#: Time after which no further option is compared [s].
_COMPARING_SECONDS = 60.0
#: Distance of two models below which they count as equal, as a fraction of FedAvg's distance to the initial model.
_EQUAL = 1e-3


@dataclass(frozen=True)
class Answer:
    """One task or evaluation, as its silo or the evaluator carried it out, or as estimated from one step."""

    name: str
    seconds: float  # time that it took [s]
    down: int  # size of the request's payloads [bytes]
    up: int  # size of the answer's payloads [bytes]
    memory: int = 0  # growth of this process's peak memory; 0 if it needed more before, or was not measured [bytes]


@dataclass
class Rehearsal:
    """The cost of the first rounds."""

    # The tasks in order; each silo's first one is slower, as libraries start up.
    tasks: list[Answer] = field(default_factory=list)
    evaluations: list[Answer] = field(default_factory=list)  # the evaluations in order
    merges: int = 0
    seconds: float = 0.0  # time of the rounds with their evaluations, as rehearsed [s]
    answering: float = 0.0  # the part of it in which silos and evaluator worked [s]
    on_all_items: bool = True  # false if silos or evaluator had a part of the items; times of answers are extrapolated

    @property
    def merge_seconds(self) -> float:
        """Time of a merge and of the coordinator's other work for a round [s]."""
        return max(0.0, self.seconds - self.answering) / max(1, self.merges)


def size_of(payloads: Sequence[Payload]) -> int:
    """Size of payload tensors [bytes], as the summary counts traffic."""
    return sum(map(tensor_bytes, payloads))


def rehearse(run: ResolvedRun, population: Population, most: int) -> Rehearsal:
    """Carry out the first rounds of a run, at most three, until a time limit, without faults and secure sums.

    A silo with more items than ``most`` trains on this many of each kind, and its time is extrapolated.

    Raises:
        FedmqError: a task failed, or the run would be refused.
    """
    found, began = Rehearsal(), time.monotonic()
    part = part_of(population, run.scenario, most, _EVALUATED)
    factors = (len(rows) / max(1, len(kept)) for rows, kept in zip(population.train, part.train, strict=True))
    training = dict(zip(run.scenario.silo_names, factors, strict=True))
    evaluation = _evaluation_growth(population, part, run.scenario)
    found.on_all_items = set(training.values()) == {1.0} and evaluation == 1.0

    def timed(name: str, answer: PeerFunction, message: Message) -> tuple[Payload, ...]:
        asked = time.monotonic()
        payloads = answer(message)
        seconds = time.monotonic() - asked
        task = message.header.kind is Kind.TASK
        kept, longer = (found.tasks, training.get(name, 1.0)) if task else (found.evaluations, evaluation)
        kept.append(Answer(name, longer * seconds, size_of(message.payloads), size_of(payloads)))
        found.answering += seconds
        return payloads

    def note(status: Status) -> None:
        found.merges = status.round
        if status.round:
            found.seconds = time.monotonic() - began

    def over() -> bool:
        seconds = time.monotonic() - began
        return found.merges >= _MERGES or seconds > (_ENOUGH_SECONDS if found.merges else _MOST_SECONDS)

    with tempfile.TemporaryDirectory(prefix="fedmq-check-") as name:
        _carry_out(run, part, Path(name), timed, note, over, alone=True)
    return found


def part_of(population: Population, scenario: Scenario, most: int, evaluated: int) -> Population:
    """A population with a part of its data; every silo keeps items of each kind that it trains on.

    It keeps at most ``most`` items, at least 1, of each kind (pairs, images only, captions only). The evaluated split,
    and the gallery, are reduced to ``evaluated`` items if they are larger.
    """
    train = []
    for silo in population.silos:
        rows, whole = population.rows_of(silo), population.train[silo.index]
        kept = [_spread(part, most) for part in (rows.dataset, rows.image_only, rows.text_only)]
        train.append(whole if len(whole) <= most else np.unique(np.concatenate(kept)))
    # A fold may not be larger than the split.
    fewest = max(evaluated, scenario.evaluation.fold_size or 0)
    heldout, queries = _thinned(population.heldout, population.evaluated, fewest)
    galleries, database = _thinned(population.galleries, population.database, fewest)
    return replace(
        population, train=tuple(train), heldout=heldout, evaluated=queries, galleries=galleries, database=database
    )


def _spread(rows: I64, most: int) -> I64:
    """At most this many of some rows, spread evenly."""
    return rows if len(rows) <= most else rows[np.arange(most) * len(rows) // most]


def _thinned(parts: Parts, whole: I64, fewest: int) -> tuple[Parts, I64]:
    """Every k-th row of each silo's part of a split, and of the split, int64 [n]; at least ``fewest`` of it remain."""
    stride = max(1, len(whole) // fewest)
    kept = tuple(part[::stride] for part in parts)
    return kept, np.unique(np.concatenate([whole[::stride], *kept]))


def _evaluation_growth(population: Population, part: Population, scenario: Scenario) -> float:
    """By which factor an evaluation of all the data takes longer than one of the part.

    Items are embedded in linear and ranked in quadratic time; the estimate is the geometric mean of both.
    """
    queries = len(population.evaluated) / max(1, len(part.evaluated))
    gallery = queries
    if scenario.evaluation.gallery == "database" and len(part.database):
        gallery = len(population.database) / len(part.database)
    return max(queries, gallery) * math.sqrt(min(queries, gallery))


def _carry_out(
    run: ResolvedRun,
    population: Population,
    place: Path,
    through: Callable[[str, PeerFunction, Message], tuple[Payload, ...]],
    note: Callable[[Status], None] = lambda status: None,
    over: Callable[[], bool] = lambda: False,
    *,
    alone: bool = False,
) -> None:
    """Carry out a run without its faults and secure sums, in the folder ``place``, until ``over`` is true.

    ``through`` answers every request, given the name and the function of its silo or evaluator; with ``alone`` one at a
    time, so that each can be timed, and with a checkpoint after each merge. Silos and evaluator have the data of
    ``population``, which may be a part of the run's.
    """
    # Silos in one process have no keys for masks. Without noise the masks cancel, so the model is nearly the same.
    privacy = run.scenario.privacy.model_copy(update={"secure_aggregation": None, "adaptive_clip": None})
    changes = {"faults": (), "clock": "virtual", "privacy": privacy}
    run = replace(run, scenario=run.scenario.model_copy(update=changes))

    def peers(_: Population) -> PeerFunctions:
        made = inline_peers(run, RunFolder(place), population.prepared.folder, population)
        answers = {each: partial(through, each, made.answers[each]) for each in made.answers}
        return replace(made, answers=answers, pool=None if alone else made.pool)

    data, between = population.prepared.folder, 0.0 if alone else math.inf
    arguments = CoordinatorArguments(run, InProcessPeers.uri, place, place, data=data, checkpoint_seconds=between)
    run_coordinator(arguments, status=note, stop_wanted=over, peers=peers)


# -------------------------------------------------------------------------------------------- settings without effect
class Finding(StrEnum):
    """Kind of a warning."""

    ONE_STEP_TASKS = "one_step_tasks"  # every task is one optimiser step
    EQUALS_FEDAVG = "equals_fedavg"  # the method trains the same model as FedAvg, or nearly
    OPTION_WITHOUT_EFFECT = "option_without_effect"  # an option that is set does not change a single bit
    LITTLE_PRIVACY = "little_privacy"  # a setting of privacy that protects less than it seems to
    NOT_COMPARED = "not_compared"  # something could not be compared


@dataclass(frozen=True)
class CheckWarning:
    """A warning that a setting has no effect, or was not compared."""

    finding: Finding
    text: str  # one line for a reader


def check_warnings(run: ResolvedRun, population: Population, merges: int, most: int) -> Iterator[CheckWarning]:
    """Warn of tasks of a single step, a method that is FedAvg, options without effect, and sums of two silos.

    The first rounds are carried out with all parts of the method switched on from the start, then with FedAvg, and then
    without each option that the scenario sets. Everything that is sent and stored is compared. At least two merges are
    carried out; with 0, because tasks take too long, nothing is compared. A silo with more items than ``most`` trains
    on this many of each kind.
    """
    steps = _steps(run.scenario, population)
    if steps == {1}:
        yield CheckWarning(Finding.ONE_STEP_TASKS, ONE_STEP_TASKS)
    for line in _little_privacy(run.scenario, population):
        yield CheckWarning(Finding.LITTLE_PRIVACY, line)
    if not merges:
        yield CheckWarning(
            Finding.NOT_COMPARED, "neither the method nor its options are compared: a task takes too long"
        )
        return
    given, part = tuple(run.source.scenario.protocol.options), part_of(population, run.scenario, most, _COMPARED)
    try:
        run = _all_parts_on(run)
        usual = _rounds(run, part, max(merges, _COMPARED_MERGES))
    except FedmqError as error:
        yield CheckWarning(Finding.NOT_COMPARED, f"the method and its options are not compared: {error}")
        return
    evened = len(steps) > 1 and len(_steps(run.scenario, part)) == 1
    yield from _compared_with_fedavg(run, part, usual, evened=evened)
    yield from _compared_without_options(run, given, part, usual)


def _little_privacy(scenario: Scenario, population: Population) -> Iterator[str]:
    """Groups of items that are larger than a silo, and sums of two silos, from which each learns the other's part."""
    context = population.context(scenario, population.build_model(scenario, "cpu", ()))
    method, items = protocols.create(scenario.protocol, context), scenario.privacy.items
    eligible = list(filter(method.eligible, context.silos))
    if items is not None:
        sizes = {silo.name: len(population.train[silo.index]) for silo in eligible}
        if small := [name for name, size in sizes.items() if size < items.group]:
            fewest = min(sizes.values())
            yield (
                f"privacy.items.group: {items.group} is more than the training items of {first_few(small, 3)}, where "
                f"all items are one group; at most {max(1, fewest // 2)} makes several groups"
            )
    added = scenario.privacy.secure_aggregation is not None or any(
        RouterSums in method.uploads(one) for one in eligible
    )
    if added and cohort_size(scenario.participation.rate, len(eligible)) == 2:
        yield "a round has two silos, and each can subtract its own part from their sum, which leaves the other's"


def _steps(scenario: Scenario, population: Population) -> set[int]:
    """The different numbers of steps that a task takes in the silos."""
    counts = (len(population.train[silo.index]) for silo in population.silos)
    return {steps_per_task(scenario, count) for count in counts if count}


@dataclass(frozen=True)
class _Rounds:
    """The first rounds of a run."""

    merges: int
    theta: torch.Tensor  # float32 [P], the shared parameters after them
    # Digests of everything that was sent and stored, by name: payloads, states of the coordinator, states of silos.
    content: Mapping[str, object]


def _rounds(run: ResolvedRun, population: Population, merges: int) -> _Rounds:
    """Carry out a run of some ``merges``, with its last evaluation.

    Raises:
        FedmqError: a task failed, or the run would be refused.
    """
    scenario = run.scenario
    training = scenario.training.model_copy(update={"schedule_rounds": scenario.schedule_rounds})
    evaluation = scenario.evaluation.model_copy(
        update={"every": 0, "personal_every": 0, "patience": None, "keep": "last"}
    )
    run = run.changed(scenario.model_copy(update={"rounds": merges, "training": training, "evaluation": evaluation}))
    content: dict[str, object] = {}

    def through(name: str, answer: PeerFunction, message: Message) -> tuple[Payload, ...]:
        payloads, header = answer(message), message.header
        what = f"{header.kind} {header.sequence} of {name} at version {header.base_version}"
        content[what] = [digest(payload) for payload in (*message.payloads, *payloads)]
        return payloads

    with tempfile.TemporaryDirectory(prefix="fedmq-check-") as name:
        place = RunFolder(Path(name))
        _carry_out(run, population, place.root, through)
        saved = checkpoints.load(place.checkpoints)
        assert saved is not None  # noqa: S101 - the run is finished
        # Digests of the tensors, not of the files: equal metadata may be in a different order.
        for file in sorted(place.checkpoints.rglob("*.safetensors")):
            content[str(file.relative_to(place.root))] = {
                name: hashlib.sha256(bytes_of(tensor)).hexdigest() for name, tensor in load_aligned(file).items()
            }
    state = saved.states[saved.rounds.version]
    content["values"] = json.dumps(state.values, sort_keys=True, default=str)
    return _Rounds(merges, state.theta, content)


def _with_method(run: ResolvedRun, name: str, options: Mapping[str, object]) -> ResolvedRun:
    """The run with another method or other options.

    Raises:
        InputError: an option is not allowed, or the method does not fit the scenario.
    """
    choice = ProtocolChoice.model_validate({"name": name, **options})
    scenario = run.scenario.model_copy(update={"protocol": choice})
    return resolve(replace(run.source, scenario=scenario), protocols)


def _all_parts_on(run: ResolvedRun) -> ResolvedRun:
    """The run with the parts of its method that begin in a later round switched on from the start."""
    choice = run.scenario.protocol
    facts = protocols.method_facts(choice, run.scenario.objective)
    later = {name: 0 for name, round_, _, _ in facts.begins if round_}
    return _with_method(run, choice.name, {**choice.options, **later}) if later else run


def _compared_with_fedavg(
    run: ResolvedRun, population: Population, usual: _Rounds, *, evened: bool
) -> Iterator[CheckWarning]:
    """Warn if FedAvg, with the same values of common options, trains the same model in the first rounds.

    ``evened``: the silos take different numbers of steps, but not on this part of their items. FedNova is FedAvg then.
    """
    label, options = run.scenario.protocol.label, run.scenario.protocol.options
    if label == "fedavg" or run.pooled or run.personal_only:
        return
    common = {each.name for each in fields(protocols.load("fedavg").Options)} & options.keys()
    try:
        plain = _with_method(run, "fedavg", {name: options[name] for name in common})
        average = _rounds(plain, population, usual.merges)
    except FedmqError as error:
        yield CheckWarning(Finding.NOT_COMPARED, f"{label} is not compared with FedAvg: {error}")
        return
    start = population.build_model(run.scenario, "cpu", ()).flat.detach()
    distance, moved = (
        float(torch.linalg.vector_norm(average.theta - other, dtype=torch.float64)) for other in (usual.theta, start)
    )
    after = f"after {counted(usual.merges, 'round')} with all its parts switched on, its model"
    if distance == 0 and protocols.traits_of(run.scenario).personalised:
        return  # its silos' personal models may be all that it adds, as with Ditto
    if evened and distance < _EQUAL * moved:
        why = "on the part of the items that this check takes, all silos take the same number of steps"
        yield CheckWarning(Finding.NOT_COMPARED, f"{label} is not compared with FedAvg: {why}")
    elif distance == 0:
        yield CheckWarning(Finding.EQUALS_FEDAVG, f"{label} is FedAvg here: {after} is bit-identical to FedAvg's")
    elif moved and distance / moved < _EQUAL:
        share = f"{distance / moved:.1g} of FedAvg's distance to the initial model"
        yield CheckWarning(Finding.EQUALS_FEDAVG, f"{label} is nearly FedAvg here: {after} differs by {share}")


def _compared_without_options(
    run: ResolvedRun, given: Sequence[str], population: Population, usual: _Rounds
) -> Iterator[CheckWarning]:
    """Warn of each ``given`` option that does not change a single bit of the first rounds."""
    choice, began, took, left = run.scenario.protocol, time.monotonic(), 0.0, list[str]()
    for name, other in _alternatives(run, given):
        started = time.monotonic()
        if started - began + took > _COMPARING_SECONDS:
            left.append(name)
            continue
        try:
            rounds = _rounds(_with_method(run, choice.name, {**choice.options, name: other}), population, usual.merges)
        except FedmqError:
            left.append(name)
            continue
        took = time.monotonic() - started
        if rounds.content == usual.content:
            what = f"protocol.{name}: {choice.options[name]} has no effect in the first "
            same = f"{counted(usual.merges, 'round')}: with {other} they are bit-identical"
            yield CheckWarning(Finding.OPTION_WITHOUT_EFFECT, f"{what}{same}")
    if left:
        what = f"options that are not compared, as that takes too long or fails: {', '.join(left)}"
        yield CheckWarning(Finding.NOT_COMPARED, what)


def _alternatives(run: ResolvedRun, given: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Each ``given`` option with the value to compare it with: off, or otherwise its default.

    Off is 0 for a number, and the other value for a flag. Three kinds of options are left out: those without another
    value, those that the check of the scenario itself reports to have no effect, and those that say when a part begins.
    """
    choice = run.scenario.protocol
    facts, kind = protocols.method_facts(choice, run.scenario.objective), protocols.load(choice.name)
    known = {name for name, _, _ in facts.without_effect} | {name for name, *_ in facts.begins}
    defaults = {each.name: each.default for each in fields(kind.Options)}
    for name in given:
        value = choice.options[name]
        off = not value if isinstance(value, bool) else 0 if isinstance(value, int | float) else None
        for other in (off, defaults[name]):
            if name in known or other is None or other == value:
                continue
            try:
                protocols.options_of(kind, {**choice.options, name: other})
            except InputError:
                continue
            yield name, other
            break
