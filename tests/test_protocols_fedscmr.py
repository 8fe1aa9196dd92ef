"""Behaviour specific to FedSCMR and FedCMR."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from fedmq.config.scenario import Objective
from fedmq.data.labels import COARSE
from fedmq.evaluation.label_metrics import cosine_metrics
from fedmq.federation.protocol import Local, Task, Trained
from fedmq.models.two_tower import Out
from fedmq.wire.payloads import Loss, MeanAveragePrecision, PartialDelta
from protocols import fedavg, fedcmr, fedscmr
from protocols.objectives.dscmr import pair_likelihood
from protocols.parts import aggregation, training
from protocols.parts.personal_model import OWN
from tests import in_process_run
from tests.replies import payload_of, with_payload
from tests.small_federation import part, population
from tests.threaded_run import resolved

PAIRED = ((True, True),) * 3


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
        run.protocol.merge(
            run.state,
            [with_payload(reply, MeanAveragePrecision(value)) for reply, value in zip(replies, values, strict=True)],
            0,
        )
        for values in ((0.5, 0.5, 0.5), (0.9, 0.5, 0.5))
    ]
    first = [merged.log["weight_silo-00"] for merged in weights]
    assert first[1] > first[0] + 0.1


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


def test_pairs_held_out_by_the_scenario_replace_the_silos_own_validation_share() -> None:
    run = population("fedscmr", kinds=PAIRED, sizes=(10, 10, 10))
    first, task = run.context.silos[0], Task(1, 0, 0, 1e-3, run.protocol.task(run.state, run.context.silos[0]))
    measured = []
    for rows in (slice(0, 3), slice(3, 9)):
        items = part(run.shares[1], rows, image=True, text=True)
        trained = run.protocol.train(Local(first, run.shares[0], run.model, {}, validation=items), task)
        update, value = (
            next(each for each in trained.payloads if isinstance(each, kind))
            for kind in (PartialDelta, MeanAveragePrecision)
        )
        assert update.n_samples == 10
        measured.append((update.buffer, value))
    assert np.array_equal(measured[0][0], measured[1][0])
    assert measured[0][1] != measured[1][1]


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_no_method_trains_on_the_pairs_that_the_scenario_holds_out(
    share: float, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Local] = {}
    train = fedavg.FedAvg.train

    def watched(protocol: fedavg.FedAvg, local: Local, task: Task) -> Trained:
        seen[local.silo.name] = local
        return train(protocol, local, task)

    monkeypatch.setattr(fedavg.FedAvg, "train", watched)
    off = ("protocol={name: paired_only}", "launcher=inline", "rounds=1", "participation=1.0")
    scenario = resolved(tiny, *off, f"training.validation={share}")
    assert in_process_run.run(scenario, tmp_path).summary is not None
    assert sorted(seen) == ["silo-00", "silo-01"]
    for local in seen.values():
        if share == 0.0:
            assert (len(local.dataset), local.validation) == (25, None)
            continue
        assert local.validation is not None
        assert (len(local.dataset), len(local.validation)) == (20, 5)
        rows = torch.cat([local.dataset.rows, local.validation.rows])
        assert len(set(rows.tolist())) == 25


def test_items_are_compared_in_s_unless_the_released_global_model_gives_s_prime() -> None:
    outs = Out(torch.ones(2, 8), torch.zeros(2, 8), torch.ones(2, 8))
    for options, space in (
        ({}, outs.raw),
        ({"eval_space": "enhanced"}, outs.code),
        ({"shared_layers": "all"}, outs.code),
    ):
        run = population("fedscmr", options, kinds=PAIRED)
        assert torch.equal(run.protocol._space(outs), space)  # type: ignore[attr-defined]


def test_fedcmr_starts_from_the_merged_layer_minus_half_the_silos_displacement() -> None:
    run = population("fedcmr", {"local_share": 0.0}, kinds=PAIRED[:1], sizes=(8,))
    layout, shared = run.model.layout, run.protocol.shared  # type: ignore[attr-defined]
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


def test_a_silo_that_cannot_measure_a_map_counts_as_the_median_of_all_that_did() -> None:
    run = population("fedscmr", {"sums": "reporters"})
    quality = torch.tensor([0.2, -1.0, -1.0, 0.8], dtype=torch.float64)
    alone = fedscmr._filled(quality[1:3], quality)
    assert alone.tolist() == [0.5, 0.5]
    replies = run.replies()
    table = run.protocol.merge(run.state, replies, 0).state.tensors["scmr_table"]
    assert (table[:, 3] >= 0).tolist() == [True, False, False, True]


@pytest.mark.parametrize("name", ["fedscmr", "fedcmr"])
def test_losses_below_zero_leave_every_weight_finite(name: str) -> None:
    run = population(name, kinds=PAIRED)
    replies = [with_payload(reply, Loss(loss)) for reply, loss in zip(run.replies(), (-10.0, 5.0, 5.01), strict=True)]
    assert bool(torch.isfinite(run.protocol.merge(run.state, replies, 0).state.theta).all())


def test_a_silo_past_the_age_limit_is_left_out_of_the_median() -> None:
    run = population("fedscmr")
    replies = [
        with_payload(reply, MeanAveragePrecision(0.1 if reply.silo.index == 0 else 0.9)) for reply in run.replies()
    ]
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
