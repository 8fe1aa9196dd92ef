"""Behaviour specific to FedBridge."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from fedmq.config.scenario import Training
from fedmq.errors import InputError, RemoteWireError
from fedmq.federation.protocol import Local, Task, Update, take
from fedmq.wire.payloads import ClassPrototypes, Delta, Loss
from protocols import fedbridge
from protocols.parts import centroids, training
from tests.small_federation import DIM, population

NOW = {"warmup": 0.0, "support": 2, "centroids": 3}


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def delta(reply: Update) -> np.ndarray:
    return take(reply.payloads, Delta).buffer


def test_silos_that_lack_a_modality_idle_during_the_warm_up() -> None:
    run = population("fedbridge", {**NOW, "warmup": 0.4})
    for round_ in range(4):
        replies = run.replies()
        for reply in replies:  # the first round after the warm-up brings the first centroids
            assert delta(reply).any() == (reply.silo.paired or round_ >= 3)
        run.state = run.protocol.merge(run.state, replies, run.version).state
        run.version += 1


def test_a_centroid_with_fewer_samples_than_the_minimum_support_is_not_reported() -> None:
    z = torch.cat([unit(1, 8).expand(9, 8), -unit(1, 8).expand(2, 8)])
    found, sizes = centroids.centroids_of(z, centroids.members_of(z, 4, 3, np.random.default_rng(1)), 4)
    assert sizes.tolist().count(9) == 1
    assert all(size == 0 or size >= 3 for size in sizes.tolist())
    assert not found[sizes == 0].any()
    assert centroids.members_of(unit(2, 8), 4, 3, np.random.default_rng(1)).tolist() == [-1, -1]


def test_a_centroid_covers_the_same_items_in_every_report() -> None:
    run = population("fedbridge", NOW)
    silo = run.context.silos[0]
    first = run.train(silo)
    members = {name: value.clone() for name, value in first.state.items()}
    kinds = [f"{kind}_{modality}" for kind in (centroids.MEMBERS, centroids.ROWS) for modality in ("image", "text")]
    assert sorted(members) == kinds
    for _ in range(3):
        run.round()
    last = run.train(silo)
    assert all(torch.equal(last.state[name], members[name]) for name in members)
    one, other = (take(each.payloads, ClassPrototypes) for each in (first, last))
    assert np.array_equal(one.counts, other.counts)
    assert not np.array_equal(one.prototypes, other.prototypes)


def test_reports_of_one_model_do_not_depend_on_the_sampled_captions() -> None:
    run = population("fedbridge", NOW)
    silo = next(each for each in run.context.silos if each.text)
    reports = []
    for sequence in range(3):
        local = Local(silo, run.shares[silo.index], run.model, {})
        local.model.load(run.state.theta)
        task = Task(sequence, 0, 0, 0.01, run.protocol.task(run.state, silo))
        reports.append(centroids.report(local, run.context, task, 3, 2, begun=True)[0])
    assert reports[0].counts.any()
    assert all(np.array_equal(reports[0].prototypes, each.prototypes) for each in reports[1:])


def test_the_second_caption_differs_from_the_first_where_there_are_several() -> None:
    local = type("L", (), {"dataset": type("S", (), {"captions": torch.tensor([1, 2, 5, 1, 5, 3])})})()
    for seed in range(20):
        generator = np.random.default_rng(seed)
        caption = (generator.random(6) * local.dataset.captions.numpy()).astype(np.int64)
        other = fedbridge._another(local, caption, generator)
        assert (other < local.dataset.captions.numpy()).all()
        assert ((other != caption) == (local.dataset.captions.numpy() > 1)).all()


def test_items_with_one_caption_have_no_caption_contrast() -> None:
    updates = []
    for weight in (0.0, 1.0):
        run = population("fedbridge", {**NOW, "lambda_pair": weight})
        run.shares = {
            index: share if share.text is None else dataclasses.replace(share, captions=torch.ones_like(share.captions))
            for index, share in run.shares.items()
        }
        run.round()
        silo = next(each for each in run.context.silos if each.text and not each.image)
        updates.append(delta(run.reply(silo, run.train(silo))))
    assert updates[0].any()
    assert np.array_equal(*updates)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedbridge", {"warmup": 0.0, "support": 3, "centroids": 5}),
        ("rcsr", {"anchor": "multi", "warmup": 0, "anchor_support": 3, "anchor_centroids": 5}),
    ],
)
def test_when_a_silos_items_change_each_is_still_in_at_most_one_centroid(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = population(name, options, kinds=((True, True),), sizes=(60,))
    silo, pool = run.context.silos[0], run.shares[0]
    image = 3 * torch.eye(DIM)[torch.arange(60) // 8] + 0.1 * unit(60, DIM)  # groups of eight equal rows
    text = image[:, None].repeat(1, 3, 1)
    reported: list[dict[int, frozenset[int]]] = []
    means = centroids.centroids_of

    def watched(z: torch.Tensor, members: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = run.shares[0].rows
        reported.append({c: frozenset(rows[members == c].tolist()) for c in set(members.tolist()) - {-1}})
        assert all(len(each) == int((members == c).sum()) for c, each in reported[-1].items()), "an item twice"
        return means(z, members, count)

    def hold(rows: torch.Tensor) -> None:
        some = dataclasses.replace(pool, image=image[rows], text=text[rows], captions=pool.captions[rows])
        run.shares = {0: dataclasses.replace(some, labels=None, rows=rows)}
        run.train(silo)

    monkeypatch.setattr(centroids, "centroids_of", watched)
    before = torch.arange(40)
    hold(before)
    after = before.clone()
    after[:6] = torch.tensor([50, 51, 52, 53, 54, 39])  # the last row is already in it
    hold(after)
    hold(after)
    hold(before)
    hold(torch.cat([before[:30], torch.arange(45, 55)]))
    for modality in (0, 1):
        first, second, third, fourth, last = reported[modality::2]
        assert second == third
        kept = {each for each in first.values() if not each & set(range(6))}
        assert kept and kept <= set(second.values())
        new = set(second.values()) - kept
        assert new and all(each <= set(range(50, 55)) for each in new)
        every = {each for found in (first, second, fourth, last) for each in found.values()}
        assert all(one == other or not one & other for one in every for other in every)


def test_centroids_older_than_the_scenarios_age_limit_are_dropped() -> None:
    run = population("fedbridge", NOW)
    run.protocol.context = dataclasses.replace(run.context, max_age=2)  # type: ignore[attr-defined]
    paired, others = run.context.silos[0], [run.context.silos[3]]
    run.round([paired])
    known = [run.round(others)["centroids"] for _ in range(4)]
    assert known[0] > known[-1] > 0


def test_an_older_report_does_not_replace_a_newer_one() -> None:
    run = population("fedbridge", NOW)
    silo = run.context.silos[0]
    run.round([silo])
    run.round([silo])
    before = run.state.tensors["centroids"][silo.index]
    late = run.reply(silo, run.train(silo), staleness=2)
    after = run.protocol.merge(run.state, [late], run.version).state.tensors["centroids"][silo.index]
    assert torch.equal(before, after)


def test_centroids_are_sent_only_to_silos_that_lack_the_modality() -> None:
    run = population("fedbridge", NOW)
    run.round()
    for silo in run.eligible:
        given = [each for each in run.protocol.task(run.state, silo) if isinstance(each, ClassPrototypes)]
        if silo.paired:
            assert not given
        else:
            assert given[0].modality == ("text" if silo.image else "image")
            assert (given[0].counts > 0).all()


def test_without_pseudo_labels_no_centroids_are_sent() -> None:
    run = population("fedbridge", {**NOW, "lambda_pseudo": 0.0})
    run.round()
    assert all(len(run.protocol.task(run.state, silo)) == 1 for silo in run.eligible)
    for reply in run.replies():
        assert delta(reply).any() and not take(reply.payloads, ClassPrototypes).counts.any()


def test_reports_about_a_modality_that_the_silo_lacks_are_ignored() -> None:
    run = population("fedbridge", NOW)
    replies = run.replies()
    image_only = next(reply for reply in replies if reply.silo.image and not reply.silo.text)
    forged = ClassPrototypes(np.ones((6, DIM), np.float32), np.full(6, 9, np.int64), "both")
    payloads = tuple(forged if isinstance(each, ClassPrototypes) else each for each in image_only.payloads)
    merged = run.protocol.merge(run.state, [dataclasses.replace(image_only, payloads=payloads)], 0).state
    assert merged.tensors["centroid_counts"][image_only.silo.index, 0].all()
    assert not merged.tensors["centroid_counts"][image_only.silo.index, 1].any()


def test_centroids_of_more_samples_than_the_silo_has_are_refused() -> None:
    run = population("fedbridge", NOW)
    for reply in run.replies():
        given = take(reply.payloads, ClassPrototypes)
        run.protocol.check(reply.payloads)  # type: ignore[attr-defined]
        for half in (slice(0, 3), slice(3, 6)):
            counts = given.counts.copy()
            counts[half] = (1 << 63) - 1 if reply.silo.paired else 4
            lie = dataclasses.replace(given, counts=counts)
            payloads = tuple(lie if isinstance(each, ClassPrototypes) else each for each in reply.payloads)
            with pytest.raises(RemoteWireError, match="samples"):
                run.protocol.check(payloads)  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------- contrast of views, by numpy
def log_softmax(scores: np.ndarray, axis: int) -> np.ndarray:
    top: np.ndarray = scores - scores.max(axis=axis, keepdims=True)
    result: np.ndarray = top - np.log(np.exp(top).sum(axis=axis, keepdims=True))
    return result


def contrast(z: np.ndarray, w: np.ndarray, tau: float) -> float:
    scores = z @ w.T / tau
    own = np.arange(len(z))
    return float(-0.5 * (log_softmax(scores, 1)[own, own] + log_softmax(scores, 0)[own, own]).mean())


@pytest.mark.parametrize("modality", ["image", "text"])
def test_the_loss_of_single_modality_silos_is_the_contrast_of_views_and_the_assignment_to_centroids(
    modality: str,
) -> None:
    options = {**NOW, "feature_dropout": 0.4, "lambda_pair": 0.7, "lambda_keep": 0.0}
    run = population("fedbridge", options, training=Training(batch_size=64, local_epochs=1))
    run.round()
    silo = run.context.silos[1 if modality == "image" else 2]
    task = Task(2, 1, 1, 0.01, run.protocol.task(run.state, silo))
    local = Local(silo, run.shares[silo.index], run.model, {})
    items, counts = local.dataset, local.dataset.captions.numpy()
    generator = training.generator_of(run.context, local, task, "train")
    if items.text is not None:
        caption = (generator.random(len(counts)) * counts).astype(np.int64)
        ahead = 1 + (generator.random(len(counts)) * (counts - 1)).astype(np.int64)
        other = np.where(counts > 1, (caption + ahead) % counts, caption)
    rows = generator.permutation(len(counts))
    kept = generator.random((len(rows), DIM)) >= 0.4
    run.model.load(run.state.theta)

    def embedded(inputs: torch.Tensor) -> np.ndarray:
        with torch.no_grad():
            return run.model.outputs(modality, inputs).code.double().numpy()  # type: ignore[arg-type]

    if items.text is not None:
        first, second = (items.text[torch.from_numpy(rows), torch.from_numpy(each[rows])] for each in (caption, other))
    else:
        assert items.image is not None
        first = second = items.image[rows]
    received = centroids.received(task.payloads, silo)
    assert received is not None
    anchors = received.double().numpy()
    target = np.exp(log_softmax(embedded(first) @ anchors.T / 0.05, 1))
    z = embedded(first)
    apart = (target * (np.log(target) - log_softmax(z @ anchors.T / 0.07, 1))).sum(axis=1).mean()
    expected = apart + 0.7 * contrast(z, embedded(second * torch.from_numpy(kept / 0.6).float()), 0.07)
    assert take(run.protocol.train(local, task).payloads, Loss).value == pytest.approx(expected, rel=1e-5)


def test_pixels_have_no_views_by_dropout() -> None:
    run = population("fedbridge", {**NOW, "feature_dropout": 0.4})
    run.round()
    silo = run.context.silos[1]
    local = Local(silo, run.shares[1], run.model, {})
    work = run.protocol._work(local, Task(2, 1, 1, 0.01, run.protocol.task(run.state, silo)))  # type: ignore[attr-defined]
    pixels = dataclasses.replace(local.dataset, image=torch.zeros(9, DIM, dtype=torch.uint8))
    work = dataclasses.replace(work, local=dataclasses.replace(local, dataset=pixels))
    with pytest.raises(InputError, match=r"feature_dropout.*features"):
        work._second(np.arange(9), other=None, generator=np.random.default_rng(0))
