"""Behaviour specific to FedSCMR and FedCMR."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
import torch

from fedmq.config.scenario import Objective, Training
from fedmq.config.sections import Robust
from fedmq.data.labels import COARSE
from fedmq.errors import InputError
from fedmq.evaluation.label_metrics import cosine_metrics
from fedmq.federation.protocol import Local, Update, take
from fedmq.models.two_tower import Out
from fedmq.wire.payloads import Loss, MeanAveragePrecision, PartialDelta
from protocols import fedcmr, fedscmr
from protocols.objectives.dscmr import pair_likelihood
from protocols.parts import aggregation, training
from protocols.parts.personal_model import OWN
from protocols.parts.robust import robust_replies
from tests.replies import payload_of
from tests.small_federation import population

PAIRED = ((True, True),) * 3


def with_map(reply: Update, value: float) -> Update:
    new = MeanAveragePrecision(value)
    return dataclasses.replace(
        reply, payloads=tuple(new if isinstance(each, MeanAveragePrecision) else each for each in reply.payloads)
    )


def test_with_every_switch_off_fedscmr_equals_fedavg_on_its_base_to_the_bit() -> None:
    objective = Objective(base="dscmr", bits=8, hidden=16, enhance=True, alpha=0.0, beta=0.0)
    off = {"loss_cs": False, "loss_ccs": False, "agg": "samples", "shared_layers": "all", "validation": 0.0}
    plain, run = population("fedavg", objective=objective), population("fedscmr", off, objective=objective)
    for _ in range(3):
        plain.round()
        run.round()
        assert torch.equal(plain.state.theta, run.state.theta)


def test_only_the_shared_linear_layers_leave_a_silo() -> None:
    run = population("fedscmr")
    for reply in run.replies():
        (update,) = [payload for payload in reply.payloads if isinstance(payload, PartialDelta)]
        assert {name.rpartition(".")[0] for name in update.names} == {"shared.base", "shared.enhance"}
        kept = run.personal[reply.silo.index][OWN]
        assert len(kept) + len(update.buffer) == run.model.layout.size


def test_a_silo_with_a_better_validation_map_is_weighted_more() -> None:
    run = population("fedscmr", kinds=PAIRED)
    replies = run.replies()
    weights = [
        run.protocol.merge(run.state, [with_map(reply, value) for reply, value in zip(replies, values, strict=True)], 0)
        for values in ((0.5, 0.5, 0.5), (0.9, 0.5, 0.5))
    ]
    first = [merged.log["weight_silo-00"] for merged in weights]
    assert first[1] > first[0] + 0.1


def test_without_phi_the_validation_map_has_no_effect() -> None:
    run = population("fedscmr", {"use_phi": False}, kinds=PAIRED)
    replies = run.replies()
    thetas = [
        run.protocol.merge(run.state, [with_map(replies[0], value), *replies[1:]], 0).state.theta
        for value in (0.1, 0.9)
    ]
    assert torch.equal(*thetas)


def test_if_all_validation_maps_are_zero_no_silo_loses_its_weight() -> None:
    run = population("fedscmr", kinds=PAIRED)
    merged = run.protocol.merge(run.state, [with_map(reply, 0.0) for reply in run.replies()], 0)
    weights = [merged.log[f"weight_silo-0{index}"] for index in range(3)]
    assert sum(weights) == pytest.approx(1.0)
    assert min(weights) > 0.2


def test_a_silo_without_captions_measures_no_map_and_is_still_weighted() -> None:
    run = population("fedscmr")
    replies = run.replies()
    single = [reply for reply in replies if not reply.silo.paired]
    assert single
    for reply in single:
        assert not any(isinstance(payload, MeanAveragePrecision) for payload in reply.payloads)
    log = run.protocol.merge(run.state, replies, 0).log
    assert all(log[f"weight_{reply.silo.name}"] > 0 for reply in single)


def test_validation_items_are_never_trained_on() -> None:
    run = population("fedscmr", kinds=PAIRED, sizes=(10, 10, 10))
    first = run.context.silos[0]
    rows, validation = run.protocol._split(Local(first, run.shares[0], run.model, {}))
    assert len(rows) == 8
    assert sorted([*rows, *validation]) == list(range(10))
    replies = []
    for _ in range(2):
        replies.append(run.train(first))
        run.personal[0].clear()
        run.shares[0].image[torch.from_numpy(validation)] += 1.0
    update, other = (next(each for each in reply.payloads if isinstance(each, PartialDelta)) for reply in replies)
    assert update.n_samples == 8
    assert np.array_equal(update.buffer, other.buffer)


def test_fedcmr_starts_from_the_merged_layer_minus_half_the_silos_displacement() -> None:
    run = population("fedcmr", {"local_share": 0.0}, kinds=PAIRED[:1], sizes=(8,))
    layout, shared = run.model.layout, run.protocol.partial.shared  # type: ignore[attr-defined]
    run.round()
    displacement = run.personal[0]["common_displacement"]
    common = aggregation.extract(run.state.theta, layout, shared)
    run.train(run.context.silos[0], learning_rate=1e-30)
    started = aggregation.extract(run.model.flat.detach(), layout, shared)
    torch.testing.assert_close(started, common - 0.5 * displacement)
    assert displacement.any()


def test_fedcmr_weights_by_summed_losses_and_reports_mean_losses() -> None:
    run = population("fedcmr", kinds=PAIRED[:2], sizes=(8, 32))
    trained = {silo: run.train(silo) for silo in run.eligible}
    replies = [run.reply(silo, found) for silo, found in trained.items()]
    assert [payload_of(reply, Loss).value for reply in replies] == [found.loss for found in trained.values()]
    sums = [size * payload_of(reply, Loss).value for size, reply in zip((8, 32), replies, strict=True)]
    state = run.protocol.merge(run.state, replies, 0).state
    assert state.tensors["cmr_losses"].tolist() == sums


def test_fedcmr_favours_silos_with_a_small_loss() -> None:
    run = population("fedcmr", kinds=PAIRED, sizes=(8, 8, 8))
    replies = run.replies()

    def step(losses: tuple[float, ...]) -> np.ndarray:
        given = [
            dataclasses.replace(
                reply, payloads=tuple(Loss(loss) if isinstance(each, Loss) else each for each in reply.payloads)
            )
            for reply, loss in zip(replies, losses, strict=True)
        ]
        theta = run.protocol.merge(run.state, given, 0).state.theta - run.state.theta
        return aggregation.extract(theta, run.model.layout, run.protocol.partial.shared).numpy()  # type: ignore[attr-defined]

    first = next(each for each in replies[0].payloads if isinstance(each, PartialDelta)).buffer
    assert np.linalg.norm(step((0.1, 5.0, 5.0)) - first) < np.linalg.norm(step((5.0, 0.1, 5.0)) - first)


@pytest.mark.parametrize("base", ["dcmh", "shdch", "dscmr", "csq"])
def test_without_batches_before_the_displacement_fedcmr_trains_like_fedavg(base: Any) -> None:
    objective = Objective(base=base, bits=8, hidden=16)
    run, plain = (
        population(name, options, kinds=PAIRED[:1], sizes=(11,), objective=objective)
        for name, options in (("fedcmr", {"local_share": 0.0}), ("fedavg", {}))
    )
    for each in (run, plain):
        each.train(each.context.silos[0])
    assert torch.equal(run.model.flat, plain.model.flat)


@pytest.mark.parametrize("base", ["dpsh", "triplet"])
def test_fedcmr_trains_every_item_once_per_epoch_before_or_after_the_displacement(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashing = Objective(base=base, bits=8, hidden=16)
    run = population("fedcmr", {"local_share": 0.4}, kinds=PAIRED[:1], sizes=(40,), objective=hashing)
    seen = Counter[tuple[int, int]]()
    real = fedcmr.SomeBatches.steps

    def counted(some: fedcmr.SomeBatches, epoch: int, *rest: Any) -> Iterator[training.Step]:
        for step in real(some, epoch, *rest):
            seen.update((epoch, int(row)) for row in step.rows)
            yield step

    monkeypatch.setattr(fedcmr.SomeBatches, "steps", counted)
    run.train(run.context.silos[0])
    assert run.context.training.local_epochs > 1
    assert seen == {(epoch, row): 1 for epoch in range(run.context.training.local_epochs) for row in range(40)}


@pytest.mark.parametrize("share", [0.6, 1.0])
def test_fedcmr_has_no_displacement_where_every_batch_precedes_it(share: float) -> None:
    hashing = Objective(base="dpsh", bits=8, hidden=16)
    run = population("fedcmr", {"local_share": share}, kinds=PAIRED[:1], sizes=(8,), objective=hashing)
    run.train(run.context.silos[0])
    assert not run.personal[0]["common_displacement"].any()


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_fedcmr_trains_every_batch_of_both_towers_before_or_after_the_displacement(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashing = Objective(base="dcmh", bits=8, hidden=16)
    run = population("fedcmr", {"local_share": share}, kinds=PAIRED[:1], sizes=(32,), objective=hashing)
    seen = Counter[tuple[str, ...]]()
    real = fedcmr.SomeBatches.steps

    def counted(some: fedcmr.SomeBatches, *rest: Any) -> Iterator[training.Step]:
        for step in real(some, *rest):
            seen[step.trains] += 1
            yield step

    monkeypatch.setattr(fedcmr.SomeBatches, "steps", counted)
    run.train(run.context.silos[0])
    batches = 32 // run.context.training.batch_size * run.context.training.local_epochs
    assert seen == {("image",): batches, ("text",): batches}


@pytest.mark.parametrize("base", ["dcmh", "shdch"])
def test_fedcmr_splits_each_towers_pass_of_fresh_batches(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = Objective(base=base, bits=8, hidden=16, draws="fresh")  # type: ignore[arg-type]
    # 39 items make four whole batches of 8 and, only where every item comes once, a fifth of 7.
    run = population("fedcmr", {"local_share": 0.75}, kinds=PAIRED[:1], sizes=(39,), objective=fresh)
    parts: list[list[tuple[str, ...]]] = []
    real = fedcmr.SomeBatches.steps

    def seen(some: fedcmr.SomeBatches, *rest: Any) -> Iterator[training.Step]:
        parts.append([])
        for step in real(some, *rest):
            parts[-1].append(step.trains)
            yield step

    monkeypatch.setattr(fedcmr.SomeBatches, "steps", seen)
    run.train(run.context.silos[0])
    epochs = run.context.training.local_epochs
    assert parts == [[("image",)] * 3 + [("text",)] * 3] * epochs + [[("image",), ("text",)]] * epochs


@pytest.mark.parametrize("norm", ["row", "frob"])
def test_three_and_four_pairs_use_the_same_similarity_for_multi_label_items(norm: Literal["row", "frob"]) -> None:
    generator = torch.Generator().manual_seed(0)
    image, text = (
        Out(*(torch.randn(6, 5, generator=generator) for _ in range(3)), torch.randn(6, 4, generator=generator))
        for _ in range(2)
    )
    labels = torch.tensor([[1.0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1], [0, 1, 0, 0]])
    four, three = (
        fedscmr.local_loss(image, text, labels, fedscmr.FedScmrOptions(alpha=1.0, norm=norm, pairs=pairs))
        for pairs in (4, 3)
    )
    similar = (labels @ labels.T > 0).float()
    torch.testing.assert_close(four - three, pair_likelihood(text.raw, image.raw, similar))


def test_fedcmr_runs_on_hash_layers() -> None:
    run = population("fedcmr", objective=Objective(base="dcmh", bits=8, hidden=16))
    run.round()
    assert torch.isfinite(run.state.theta).all()
    with pytest.raises(InputError, match=r"objective\.base"):
        population("fedcmr", objective=Objective())


@pytest.mark.parametrize("shared_layers", ["base_enhance", "all"])
def test_only_paired_silos_contribute_to_the_enhancenets_step(shared_layers: str) -> None:
    run = population("fedscmr", {"agg": "samples", "shared_layers": shared_layers})
    layout = run.model.layout
    names = run.protocol.traits().shared_layers  # type: ignore[attr-defined]
    part = layout.part(names)
    enhance = [name for name in names if ".enhance." in name]
    assert len(enhance) == (6 if shared_layers == "all" else 2)
    replies = run.replies()
    before = aggregation.extract(run.state.theta, layout, enhance)
    step = aggregation.extract(run.protocol.merge(run.state, replies, 0).state.theta, layout, enhance) - before
    updates = [
        next(each for each in reply.payloads if isinstance(each, PartialDelta))
        for reply in replies
        if reply.silo.paired
    ]
    assert 0 < len(updates) < len(replies)
    total = sum(update.n_samples for update in updates)
    expected = torch.zeros_like(step)
    for update in updates:
        own = aggregation.extract(torch.tensor(np.array(update.buffer)), part, enhance)
        expected += own * update.n_samples / total
    torch.testing.assert_close(step, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("rule", ["median", "trimmed_mean"])
def test_silos_that_cannot_train_the_enhancenet_have_no_weight_in_its_step(rule: Literal["median"]) -> None:
    kinds = [*[(True, True)] * 3, *[(True, False)] * 5]
    run = population("fedscmr", {"agg": "samples"}, kinds=kinds, sizes=[7] * 8)
    layout = run.model.layout
    enhance = [name for name in run.protocol.traits().shared_layers if ".enhance." in name]  # type: ignore[attr-defined]
    replies = robust_replies(run.replies(), Robust(rule=rule), layout)
    paired = replies[0]
    before = aggregation.extract(run.state.theta, layout, enhance)
    step = aggregation.extract(run.protocol.merge(run.state, replies, 0).state.theta, layout, enhance) - before
    sent = next(each for each in paired.payloads if isinstance(each, PartialDelta))
    part = layout.part(run.protocol.traits().shared_layers)  # type: ignore[attr-defined]
    torch.testing.assert_close(
        step, aggregation.extract(torch.tensor(sent.buffer), part, enhance), atol=1e-6, rtol=1e-4
    )
    assert step.any()


def test_a_silo_that_cannot_measure_a_map_counts_as_the_median_of_all_that_did() -> None:
    run = population("fedscmr", {"sums": "reporters"})
    quality = torch.tensor([0.2, -1.0, -1.0, 0.8], dtype=torch.float64)
    alone = fedscmr._filled(quality[1:3], quality)
    assert alone.tolist() == [0.5, 0.5]
    replies = run.replies()
    table = run.protocol.merge(run.state, replies, 0).state.tensors["scmr_table"]
    assert (table[:, 3] >= 0).tolist() == [True, False, False, True]


def with_loss(reply: Update, value: float) -> Update:
    payloads = tuple(Loss(value) if isinstance(each, Loss) else each for each in reply.payloads)
    return dataclasses.replace(reply, payloads=payloads)


@pytest.mark.parametrize("name", ["fedscmr", "fedcmr"])
def test_losses_below_zero_leave_every_weight_finite(name: str) -> None:
    run = population(name, kinds=PAIRED)
    replies = [with_loss(reply, loss) for reply, loss in zip(run.replies(), (-10.0, 5.0, 5.01), strict=True)]
    assert bool(torch.isfinite(run.protocol.merge(run.state, replies, 0).state.theta).all())


@pytest.mark.parametrize("name", ["fedscmr", "fedcmr"])
@pytest.mark.parametrize(("max_age", "forgotten"), [(0, True), (1, False), (None, False)])
def test_tables_of_last_scalars_drop_silos_past_the_age_limit(name: str, max_age: int | None, forgotten: bool) -> None:
    table, reporters = (population(name, {"sums": sums}, kinds=PAIRED) for sums in ("table", "reporters"))
    table.protocol.context = dataclasses.replace(table.context, max_age=max_age)  # type: ignore[attr-defined]
    thetas = []
    for run in (table, reporters):
        replies = [with_loss(reply, 0.1 + reply.silo.index) for reply in run.replies()]
        state = run.protocol.merge(run.state, replies, 0).state
        fresh = [dataclasses.replace(reply, base_version=1) for reply in replies[1:]]
        thetas.append(run.protocol.merge(state, fresh, 1).state.theta)
    assert torch.equal(*thetas) is forgotten


def test_a_silo_past_the_age_limit_is_left_out_of_the_median() -> None:
    run = population("fedscmr")
    replies = [with_map(reply, 0.1 if reply.silo.index == 0 else 0.9) for reply in run.replies()]
    state = run.protocol.merge(run.state, replies, 0).state
    fresh = [dataclasses.replace(reply, base_version=5) for reply in replies[1:]]
    for max_age, alike in ((None, False), (2, True)):  # torch's median of 0.1 and 0.9 is the lower
        run.protocol.context = dataclasses.replace(run.context, max_age=max_age)  # type: ignore[attr-defined]
        log = run.protocol.merge(state, fresh, 5).log
        assert (log["weight_silo-01"] > 0.2) is alike, (max_age, log)


def test_a_silo_validates_on_the_lower_label_level_in_a_seeded_order(monkeypatch: pytest.MonkeyPatch) -> None:
    run = population("fedscmr", kinds=PAIRED[:1], sizes=(40,))
    names = (f"{COARSE}a", f"{COARSE}b", "c", "d")
    run.protocol.context = dataclasses.replace(run.context, label_names=names)  # type: ignore[attr-defined]
    seen = []

    def spied(*args: Any, **kwargs: Any) -> Any:
        seen.append((args[2].shape[1], kwargs["order_seed"]))
        return cosine_metrics(*args, **kwargs)

    monkeypatch.setattr(fedscmr, "cosine_metrics", spied)
    local = Local(run.context.silos[0], run.shares[0], run.model, {})
    run.protocol._validated(local, np.arange(8))  # type: ignore[attr-defined]
    assert [columns for columns, _ in seen] == [2, 2]
    assert all(isinstance(order, int) for _, order in seen)


def test_the_reported_loss_is_that_of_the_last_epoch() -> None:
    means = {}
    for epochs in (1, 4):
        training = Training(batch_size=8, local_epochs=epochs, learning_rate=1e-2)
        run = population("fedscmr", kinds=PAIRED[:1], sizes=(16,), training=training)
        trained = run.train(run.context.silos[0], learning_rate=1e-2)
        means[epochs] = (trained.loss, take(trained.payloads, Loss).value)
    assert means[1][0] == means[1][1]
    assert means[4][1] < means[4][0]
