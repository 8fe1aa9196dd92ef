"""Small helpers of the methods against computed values; sums and ties where merges are of few replies."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

import protocols
from fedmq.config.scenario import Objective, ProtocolChoice, Training
from fedmq.config.sections import Robust
from fedmq.federation.protocol import Local, Task, Update
from fedmq.models.hash_networks import Tower
from fedmq.wire.payloads import ClassPrototypes, Loss
from protocols import fedcmr
from protocols.fedavg import AnchoredFedAvg, AnchoredOptions
from protocols.objectives.shdch import Level, swept_codes
from protocols.parts import centroids, class_prototypes, prototypes, robust, training
from tests.replies import payload_of, silo_of, with_payload
from tests.small_federation import SmallFederation, population

PAIRED = ((True, True),) * 4


# ----------------------------------------------------------------------------------------------------------- K-means
def test_k_means_iterates_until_every_centre_is_the_mean_of_its_nearest_points() -> None:
    generator = torch.Generator().manual_seed(0)
    points, weights = (
        torch.rand(80, 2, generator=generator).double(),
        torch.rand(80, generator=generator).double() + 0.1,
    )
    for seed in range(5):
        centres, held = centroids.k_means(points, weights, 5, np.random.default_rng(seed))
        owner = centroids.nearest(points, centres)
        for place in range(5):
            mine = owner == place
            mean = (points[mine] * weights[mine, None]).sum(0) / weights[mine].sum()
            torch.testing.assert_close(centres[place], mean)
            assert float(held[place]) == pytest.approx(float(weights[mine].sum()))


# ------------------------------------------------------------------------------------------------------------ tables
def test_a_table_entry_counts_up_to_exactly_its_age_limit() -> None:
    context = replace(population("fedavg").context, dim=2)
    for version, known in ((7, True), (8, False)):
        table = centroids.initial(context, 1)
        table[centroids.COUNTS] += 3
        table[centroids.VERSIONS] += 6  # all reported at version 5
        after = centroids.updated(table, [], version, 2)
        assert bool((after[centroids.COUNTS] > 0).all()) is known
        tables = class_prototypes.initial(4, 2, 2)
        tables[class_prototypes.COUNTS] += 3
        tables[class_prototypes.VERSIONS] += 6
        later = class_prototypes.updated(tables, [], version, max_age=2, weighted=True)
        assert bool(later[class_prototypes.VALID].all()) is known


def test_the_first_prototype_is_the_silos_mean_and_later_ones_enter_a_moving_average() -> None:
    tensors = prototypes.initial(2)
    weights, mask = torch.tensor([0.25, 0.75], dtype=torch.float64), torch.ones(2, 2, dtype=torch.bool)
    one, two = torch.tensor([[[4.0, 0.0]] * 2, [[0.0, 8.0]] * 2]), torch.tensor([[[2.0, 2.0]] * 2] * 2)
    tensors = prototypes.updated(tensors, one, mask, weights, 0.9, unit_length=False)
    assert tensors[prototypes.PROTOTYPES].tolist() == [[1.0, 6.0]] * 2
    tensors = prototypes.updated(tensors, two, mask, weights, 0.9, unit_length=False)
    torch.testing.assert_close(tensors[prototypes.PROTOTYPES], torch.tensor([[1.1, 5.6]] * 2))


def test_a_modality_reported_only_by_silos_of_zero_weight_is_unchanged() -> None:
    tensors = prototypes.initial(2)
    mask = torch.tensor([[True, False], [True, True]])  # text only from the second silo, which has no weight
    weights, local = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.ones(2, 2, 2)
    for masked in (True, False):
        after = prototypes.updated(tensors, local, mask, weights, 0.9, masked=masked)
        assert after[prototypes.VALID].tolist() == [True, False]
        assert torch.equal(after[prototypes.PROTOTYPES][1], tensors[prototypes.PROTOTYPES][1])


# ---------------------------------------------------------------------------------------------------- local training
def run_with(run: SmallFederation, silo: int, loss: training.LossFunction) -> training.TrainingResult:
    local = silo_of(run, silo)
    base = run.model.flat.detach().clone()
    work = training.EveryBatch(local, 8, loss)
    return training.train_epochs(local, run.context, Task(1, 0, 0, 1e-3, ()), base, work)


@given(st.integers(0, 60), st.integers(2, 17), st.integers(1, 2))
def test_batches_hold_every_item_once_and_none_is_smaller_than_a_contrast_needs(
    size: int, batch_size: int, least: int
) -> None:
    found = list(training.batches(size, batch_size, np.random.default_rng(0), least))
    assert len(found) == training.batch_count(size, batch_size, least)
    left_out = size < least
    order = np.random.default_rng(0).permutation(size)
    assert np.concatenate([*found, order[:0]]).tolist() == ([] if left_out else order.tolist())
    assert all(least <= len(rows) < batch_size + least for rows in found)
    assert all(len(rows) == batch_size for rows in found[:-1])


def test_a_last_batch_of_one_pair_is_joined_to_the_batch_before_it() -> None:
    run = population("fedavg", kinds=((True, True),), sizes=[9], training=Training(batch_size=8, local_epochs=1))
    work = AnchoredFedAvg(AnchoredOptions(), run.context).work(
        Local(run.context.silos[0], run.shares[0], run.model, {}), Task(1, 0, 0, 1e-3, ())
    )
    assert work is not None
    assert [len(step.rows) for step in work.steps(0, np.random.default_rng(0))] == [9]


def test_a_reported_loss_is_the_mean_over_samples_for_any_batching() -> None:
    def size(image: Tensor | None, text: Tensor | None) -> Tensor:
        assert image is not None
        return torch.tensor(float(len(image)))

    outcome = run_with(population("fedavg"), 0, size)  # 11 samples in batches of 8 and 3
    assert (outcome.loss, outcome.last_loss) == (pytest.approx(73 / 11), pytest.approx(73 / 11))


def test_silos_use_different_dropout_masks() -> None:
    run = population("fedavg", objective=Objective(base="dgcpn", bits=8, hidden=16), kinds=PAIRED)
    seeds: dict[int, set[int]] = {0: set(), 3: set()}
    for silo, seen in seeds.items():

        def looked(image: Tensor | None, text: Tensor | None, seen: set[int] = seen) -> Tensor:
            assert isinstance(run.model.visual, Tower)
            assert run.model.visual.noise is not None
            seen.add(run.model.visual.noise.initial_seed())
            return torch.zeros(())

        run_with(run, silo, looked)
    assert len(seeds[0]) == len(seeds[3]) == 1
    assert seeds[0] != seeds[3]


# ----------------------------------------------------------------------------------------------------- robust merges
def test_fractions_of_byzantine_silos_are_rounded_as_defined() -> None:
    # 0.2 of 4 may be one whole silo; 0.29 of 100 is 29, which floating point puts just below.
    apart = np.ones((4, 4)) - np.eye(4)
    apart[3, :3] = apart[:3, 3] = 9.0
    assert robust._krum(apart, Robust(rule="krum", byzantine=0.2)) == [0, 1, 2]
    assert 0.29 * 100 < 29
    rows = np.arange(100.0)[:, None] ** 3
    np.testing.assert_allclose(robust.trimmed_mean(rows, 0.29), rows[29:71].mean(0))


# ------------------------------------------------------------------------------------------------------------ methods
def test_fedcmr_reports_the_last_parts_mean_loss_and_stores_only_its_displacement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = population("fedcmr", {"local_share": 0.5}, kinds=PAIRED, training=Training(batch_size=8, local_epochs=1))
    starts: list[Tensor] = []
    real = training.train_epochs

    def watched(local: Local, context: Any, task: Task, base: Tensor, *rest: Any) -> training.TrainingResult:
        starts.append(base.clone())
        return real(local, context, task, base, *rest)

    monkeypatch.setattr(fedcmr.training, "train_epochs", watched)
    silo = run.eligible[0]
    trained = run.train(silo)
    assert len(starts) == 2
    told = payload_of(run.reply(silo, trained), Loss).value
    assert told == trained.loss > 0
    protocol: Any = run.protocol
    layout, shared = run.context.layout, protocol.shared
    end = fedcmr.aggregation.extract(run.model.flat.detach(), layout, shared)
    torch.testing.assert_close(
        trained.state[fedcmr._DISPLACEMENT], end - fedcmr.aggregation.extract(starts[1], layout, shared)
    )
    assert not torch.equal(starts[0], starts[1])


def test_rcsr_sends_no_weight_above_one() -> None:
    run = population("rcsr", {"personal": "router", "s_norm": "relative"}, kinds=PAIRED)
    protocol: Any = run.protocol
    told = protocol._personal_weights(run.state.tensors, torch.tensor([0, 2]), torch.tensor([0.9, 0.1]).double(), 2)
    assert told["personal_weights"].tolist() == pytest.approx([1.0, 1.0, 0.2, 1.0])


def test_rcsrs_router_is_not_trained_before_both_modalities_have_prototypes() -> None:
    run = population("rcsr", {"warmup": 0}, kinds=PAIRED)
    protocol: Any = run.protocol
    steps = {}
    for valid in ((True, False), (False, True), (True, True)):
        run.state = protocol.initial(run.state.theta)
        first = normalize(torch.ones(2, run.context.dim), dim=1)
        tensors = {prototypes.PROTOTYPES: first, prototypes.VALID: torch.tensor(valid)}
        state = replace(run.state, tensors={**run.state.tensors, **tensors})
        steps[valid] = protocol.merge(state, run.replies(), 0).state.values["router_steps"]
    assert steps == {(True, False): 0, (False, True): 0, (True, True): 1}


def test_an_undetermined_bit_of_a_class_code_is_unchanged() -> None:
    codes = torch.tensor([[1.0, -1.0, -1.0], [-1.0, 1.0, -1.0]])
    level = Level(1.0, torch.eye(2), codes)
    zero = torch.zeros(2, 3)
    assert torch.equal(swept_codes(level, [zero, zero], codes[:0], torch.zeros(2, 0), torch.zeros(2, 1), 3), codes)


# ---------------------------------------------------------------------------------------------- merges of few replies
THREE_PAIRS = ((True, True),) * 3
HASHING = Objective(base="triplet", bits=8, hidden=16)


def configured_for(run: SmallFederation, name: str, options: dict[str, Any], *, whole: bool) -> SmallFederation:
    """The run, whose protocol is configured for merges of whole rounds or of few replies."""
    context = dataclasses.replace(run.context, whole_rounds=whole)
    run.protocol = protocols.create(ProtocolChoice(name=name, **options), context)
    return run


@pytest.mark.parametrize("name", ["fedscmr", "fedcmr"])
def test_sums_run_over_the_table_where_merges_are_of_few_replies_unless_configured(name: str) -> None:
    def theta(sums: str | None, *, whole: bool) -> torch.Tensor:
        run = configured_for(population(name, kinds=THREE_PAIRS), name, {"sums": sums}, whole=whole)
        replies = [with_payload(reply, Loss(0.1 + reply.silo.index)) for reply in run.replies()]
        state = run.protocol.merge(run.state, replies, 0).state
        few = [dataclasses.replace(reply, base_version=1) for reply in replies[1:]]
        return run.protocol.merge(state, few, 1).state.theta

    reporters, table = theta("reporters", whole=True), theta("table", whole=False)
    assert not torch.equal(reporters, table)
    for sums, whole, expected in (
        (None, True, reporters),
        (None, False, table),
        ("reporters", False, reporters),
        ("table", True, table),
    ):
        assert torch.equal(theta(sums, whole=whole), expected), (sums, whole)


@pytest.mark.parametrize(
    ("options", "whole", "flips"),
    [({}, True, True), ({}, False, False), ({"hysteresis": 0.0}, False, True), ({"hysteresis": 0.05}, True, False)],
)
def test_a_bit_near_a_tie_is_kept_where_merges_are_of_few_replies_unless_configured(
    options: dict[str, Any], whole: bool, flips: bool
) -> None:
    run = configured_for(population("fedhap", kinds=THREE_PAIRS, objective=HASHING), "fedhap", options, whole=whole)
    replies = run.replies()

    def voting(sign: float) -> list[Update]:
        """Every silo's class means, with every bit close to a tie."""
        return [
            dataclasses.replace(
                reply,
                payloads=tuple(
                    ClassPrototypes(
                        np.full_like(each.prototypes, sign * 0.03), np.ones_like(each.counts), each.modality
                    )
                    if isinstance(each, ClassPrototypes)
                    else each
                    for each in reply.payloads
                ),
            )
            for reply in replies
        ]

    state = run.protocol.merge(run.state, voting(1.0), 0).state
    assert (state.tensors["fedhap.prototypes"] == 1).all()  # the first vote counts however close to a tie
    after = run.protocol.merge(state, voting(-1.0), 0).state.tensors["fedhap.prototypes"]
    assert (after == (-1 if flips else 1)).all()
