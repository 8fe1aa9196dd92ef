"""The fixed facts of a run, built from the scenario and the facts about its data."""

from __future__ import annotations

from dataclasses import replace

import torch

import protocols
from coordinator.aggregation import check_robust
from coordinator.cost import CostModel
from coordinator.participation import cohort_size, trace_of
from coordinator.run_context import RunContext
from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.federation import updates
from fedmq.federation.agreement import RunData
from fedmq.federation.faults import FaultSchedule
from fedmq.federation.protocol import FederatedProtocol
from fedmq.models.objective_registry import OBJECTIVES
from fedmq.runs.run_records import EvaluatedItems
from fedmq.storage.cache import file_digest
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.fields import FieldError
from fedmq.wire.payloads import Loss, Payload


def run_context_of(scenario: Scenario, data: RunData, folder: RunFolder) -> tuple[RunContext, torch.Tensor]:
    """The fixed facts of a run, and the initial parameters (float32 [P]).

    Args:
        scenario: the resolved scenario.
        data: the run's data, with the numbers of items.
        folder: the run folder.

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
    size = model.layout.nbytes
    cost = CostModel(scenario.cost, scenario.seed, scenario.silo_names, scenario.training.local_epochs, size, size)
    trace = trace_of(scenario.participation, scenario.seed, scenario.silo_names)
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
    if scenario.privacy.clip_norm is not None and not any(set(updates.TRANSFORMED) & kinds for kinds in sent):
        allowed = f"null: silos of {scenario.protocol.label} send no update that could be clipped"
        raise InputError("privacy.clip_norm", scenario.privacy.clip_norm, allowed)
    if scenario.participation.kind == "power_of_choice" and not all(Loss in kinds for kinds in sent):
        allowed = f"uniform, by_data or availability: {scenario.protocol.label} reports no losses"
        raise InputError("participation.kind", "power_of_choice", allowed)
    check_robust(run_context)
    return run_context, model.flat.detach().clone()


def selectable(scenario: Scenario, data: RunData) -> tuple[str, ...]:
    """The silos that the method can select, by what they hold at the start of the run.

    Args:
        scenario: the resolved scenario.
        data: the run's data.
    """
    context = data.context(scenario, data.build_model(scenario, "cpu", ()))
    method = protocols.create(scenario.protocol, context)
    return tuple(silo.name for silo in data.silos if method.eligible(silo))


def _samples(scenario: Scenario, data: RunData, method: FederatedProtocol) -> tuple[int, ...]:
    """Number of items that each silo trains on; if faults change its modalities, the largest number.

    Raises:
        InputError: a silo that the method can select has nothing to train on.
    """
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
