"""FedHAP, its triplets and discriminator, and the hashing bases it is compared on."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedmq.config import resolve as scenarios
from fedmq.config.scenario import Objective, Training
from fedmq.config.sections import Evaluation, MissingModality
from fedmq.data.labels import COARSE
from fedmq.data.partition import modalities
from fedmq.errors import InputError
from fedmq.evaluation.gallery_ranking import Embedded
from fedmq.evaluation.metrics import Measured, measure
from fedmq.federation.population import build_population
from fedmq.launch import preparation
from fedmq.models.hash_networks import signs, straight_through
from fedmq.models.two_tower import Out
from fedmq.wire.payloads import ClassPrototypes, Delta, DiscriminatorDelta
from protocols import fedhap, objectives
from protocols.objectives import csq, dpsh, greedyhash, triplet
from protocols.parts import class_prototypes
from protocols.parts.labelled import samples_of
from tests.replies import payload_of
from tests.small_federation import LABELS, SmallFederation, population
from tests.threaded_run import resolved, run_of

ADAM = Training(optimizer="adam", batch_size=4, local_epochs=2, weight_decay=0.0)
LONE = ((True, True), (True, False), (False, True))
OFF = {"proto_triplet": False, "discriminator": False}


def small(
    base: str = "triplet", name: str = "fedavg", options: dict[str, Any] | None = None, **changes: Any
) -> SmallFederation:
    objective = Objective(base=base, bits=changes.pop("bits", 8), hidden=16, **changes.pop("base_options", {}))
    return population(name, options, objective=objective, **{"training": ADAM, **changes})


def random_codes(n: int, bits: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, bits, generator=torch.Generator().manual_seed(seed))


def out(codes: torch.Tensor) -> Out:
    return Out(codes, codes, codes)


# --------------------------------------------------------------------------------------------------- triplets
def masks(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    similar = labels[:, None] == labels[None]
    return similar & ~torch.eye(len(labels), dtype=torch.bool), ~similar


def test_a_random_triplet_has_a_positive_and_a_negative_for_its_anchor() -> None:
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    positive, negative = masks(labels)
    found = torch.arange(36.0).view(6, 6)
    for seed in range(5):
        near, far = triplet.mined(found, positive, negative, "random", np.random.default_rng(seed))
        for anchor in range(6):
            assert float(near[anchor]) in found[anchor][positive[anchor]].tolist()
            assert float(far[anchor]) in found[anchor][negative[anchor]].tolist()


def test_an_anchor_without_a_positive_or_a_negative_is_skipped() -> None:
    generator = np.random.default_rng(0)
    positive, negative = masks(torch.tensor([0, 0, 1]))
    for mining in ("random", "hard"):
        near, far = triplet.mined(torch.rand(3, 3), positive, negative, mining, generator)
        assert len(near) == len(far) == 2
    alone, _ = masks(torch.tensor([0, 0, 0]))
    for mining in ("random", "hard", "all"):
        none = triplet.mined(torch.rand(3, 3), alone, torch.zeros(3, 3, dtype=torch.bool), mining, generator)
        assert float(triplet.triplet_loss(*none, 0.5, "mean")) == 0.0


def test_hard_triplets_have_the_largest_loss_of_an_anchors_triplets() -> None:
    codes = random_codes(8, 6)
    positive, negative = masks(torch.tensor([0, 1, 0, 1, 0, 1, 2, 2]))
    found = triplet.distances(codes, codes, "cosine")
    near, far = triplet.mined(found, positive, negative, "hard", np.random.default_rng(0))
    assert torch.equal(near, torch.stack([found[i][positive[i]].max() for i in range(8)]))
    assert torch.equal(far, torch.stack([found[i][negative[i]].min() for i in range(8)]))
    nearer, same = triplet.mined(found, positive, negative, "nearest", np.random.default_rng(0))
    assert torch.equal(nearer, torch.stack([found[i][positive[i]].min() for i in range(8)]))
    assert torch.equal(same, far)


def test_triplets_mix_modalities() -> None:
    """Two items of different classes: an anchor's only positive is the same item in the other modality."""
    labels = torch.eye(2)
    samples = samples_of(out(random_codes(2, 6)), out(random_codes(2, 6, seed=1)), labels)
    options = triplet.Options(mu=0.0)
    assert float(triplet.loss(samples, options, np.random.default_rng(0))) > 0
    alone = samples_of(out(random_codes(2, 6)), None, labels)
    assert float(triplet.loss(alone, options, np.random.default_rng(0))) == 0


def test_an_empty_bank_contributes_no_pair_gradient() -> None:
    codes = random_codes(4, 8).requires_grad_()
    labels = torch.eye(4)
    dpsh.loss(codes, labels, torch.zeros(6, 8), torch.ones(6, 4), alpha=0.0).backward()
    assert codes.grad is not None
    assert not codes.grad.any()


def test_greedyhash_shares_one_classifier_between_modalities_and_every_silo_trains_it() -> None:
    run = small("greedyhash", kinds=LONE)
    shared = run.model.branch("shared")
    assert shared.stop - shared.start == 8 * len(LABELS)
    assert all(payload_of(reply, Delta).buffer[shared].any() for reply in run.replies())


def test_several_labels_share_the_target_or_the_first_label_is_the_target() -> None:
    labels = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    soft = torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    first = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert torch.equal(greedyhash.targets(labels, "soft"), soft)
    assert torch.equal(greedyhash.targets(labels, "first"), first)


def test_hash_centres_depend_on_their_number_and_length_and_not_on_the_run_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = []
    real = csq.hash_centres, csq.tie_break

    def centres(*given: Any) -> torch.Tensor:
        drawn.append(real[0](*given))
        return drawn[-1]

    def ties(*given: Any) -> torch.Tensor:
        drawn.append(real[1](*given))
        return drawn[-1]

    monkeypatch.setattr(csq, "hash_centres", centres)
    monkeypatch.setattr(csq, "tie_break", ties)
    for seed in (0, 1):
        run = small("csq", bits=12, seed=seed)
        run.train(run.context.silos[seed])
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[3])


def test_hash_centres_are_distinct_and_reproducible_and_orthogonal_or_balanced_for_any_length() -> None:
    for classes, bits in ((10, 12), (24, 24), (80, 48), (80, 12), (40, 16), (3, 5), (10, 16), (10, 64)):
        centres = csq.hash_centres(classes, bits, np.random.default_rng(0))
        assert centres.shape == (classes, bits) and set(centres.unique().tolist()) == {-1.0, 1.0}
        assert len(np.unique(centres.numpy(), axis=0)) == classes
        assert torch.equal(centres, csq.hash_centres(classes, bits, np.random.default_rng(0)))
        if bits in (16, 64) and classes == 10:
            assert torch.equal(centres @ centres.T, bits * torch.eye(10)), "rows of a Hadamard matrix"
        else:
            assert (centres.sum(1).abs() <= bits % 2).all(), "balanced"
    drawn = csq.hash_centres(10, 24, np.random.default_rng(0))
    assert all(int((a != b).sum()) > 6 for a, b in combinations(drawn, 2)), "far apart"


# --------------------------------------------------------------------------------------------------- signs
def test_the_sign_of_zero_is_one_and_the_straight_through_sign_is_exact() -> None:
    codes = torch.tensor([0.0, -0.0, 0.3, -7.1, 1e-30]).requires_grad_()
    assert signs(codes).tolist() == [1, 1, 1, -1, 1]
    passed = straight_through(codes)
    assert passed.tolist() == [1, 1, 1, -1, 1]
    (passed * torch.arange(5.0)).sum().backward()
    assert codes.grad is not None
    assert codes.grad.tolist() == [0, 1, 2, 3, 4]


def test_a_silo_votes_with_the_mean_code_of_its_modalities() -> None:
    run = small(name="fedhap", kinds=LONE)
    for reply in run.replies():
        vote = payload_of(reply, ClassPrototypes)
        labels = run.shares[reply.silo.index].labels
        assert labels is not None
        held = reply.silo.image + reply.silo.text
        assert vote.modality == ("both" if held == 2 else "image" if reply.silo.image else "text")
        assert vote.counts.tolist() == (held * labels.sum(0)).tolist()
        assert not vote.prototypes[vote.counts == 0].any()


def test_a_prototype_is_the_sign_of_the_mean_over_the_silos_that_hold_the_class() -> None:
    run = small(name="fedhap")
    votes = [payload_of(reply, ClassPrototypes) for reply in run.replies()]
    run.state = run.protocol.merge(run.state, run.replies(), 0).state
    for label in range(len(LABELS)):
        rows = [vote.prototypes[label] for vote in votes if vote.counts[label]]
        expected = np.where(np.sum(rows, axis=0) >= 0, 1, -1)
        assert run.state.tensors["fedhap.prototypes"][label].tolist() == expected.tolist()


def test_a_class_that_no_silo_holds_has_no_prototype_or_keeps_its_last_one() -> None:
    old = torch.tensor([[1.0, -1.0], [0.0, 0.0]])
    none = fedhap.binary_prototypes(torch.zeros(2, 2), torch.zeros(2, dtype=torch.bool), old)
    assert torch.equal(none, old)


def test_hysteresis_keeps_a_bit_whose_mean_is_near_zero() -> None:
    means, old = torch.tensor([[0.04, -0.06, 0.01]]), torch.tensor([[-1.0, 1.0, 0.0]])
    valid = torch.ones(1, dtype=torch.bool)
    assert fedhap.binary_prototypes(means, valid, old, 0.05).tolist() == [[-1.0, -1.0, 1.0]]
    assert fedhap.binary_prototypes(means, valid, old).tolist() == [[1.0, -1.0, 1.0]]


def test_votes_of_silos_that_did_not_report_count_until_they_are_too_old() -> None:
    def prototypes_valid(max_age: int | None) -> list[bool]:
        run = small(name="fedhap")
        run.protocol.context = replace(run.context, max_age=max_age)  # type: ignore[attr-defined]
        run.round()
        for _ in range(3):
            run.round([run.context.silos[0]])
        return run.state.tensors[class_prototypes.VALID].tolist()

    labels = small(name="fedhap").shares[0].labels
    assert labels is not None
    assert prototypes_valid(None) == [True] * len(LABELS)
    assert prototypes_valid(1) == labels.bool().any(0).tolist()


def test_the_discriminator_learns_to_distinguish_codes_from_prototypes() -> None:
    layout = fedhap.discriminator_layout(8, 4, 16)
    prototypes, labels = signs(random_codes(4, 8)), torch.eye(4)
    training = Training(optimizer="adam", weight_decay=0.0)
    start = fedhap.initial_discriminator(layout, seed=0)
    found = fedhap.Discriminator(start, layout, prototypes, labels, training, 0.01)
    codes, own = signs(random_codes(20, 8, seed=1)), torch.eye(4).repeat(5, 1)
    before = float(found.fooled(codes, own, "nonsat", "corrected"))
    for _ in range(100):
        found.step(codes, own, "corrected")
    assert float(found.fooled(codes, own, "nonsat", "corrected")) > before + 1
    assert torch.equal(start, fedhap.initial_discriminator(layout, seed=0))


def test_shared_discriminators_are_averaged_uniformly_and_sent_as_updates() -> None:
    run = small(name="fedhap")
    run.round()
    replies = run.replies()
    state = run.protocol.merge(run.state, replies, 1).state
    changes = [payload_of(reply, DiscriminatorDelta).buffer for reply in replies]
    assert any(change.any() for change in changes)
    expected = run.state.tensors["fedhap.discriminator_change"].numpy() + np.mean(changes, axis=0)
    np.testing.assert_allclose(state.tensors["fedhap.discriminator_change"].numpy(), expected, atol=1e-6)


def test_a_personal_discriminator_never_leaves_the_silo() -> None:
    run = small(name="fedhap", options={"share_disc": False})
    for _ in range(2):
        run.round()
    kinds = {type(each) for reply in run.replies() for each in reply.payloads}
    assert DiscriminatorDelta not in kinds
    assert not any("change" in name for name in run.state.tensors)
    layout = run.protocol.layout  # type: ignore[attr-defined]
    kept = run.personal[0]["fedhap.discriminator"]
    assert kept.shape == (layout.size,)
    assert not torch.equal(kept, fedhap.initial_discriminator(layout, run.context.seed))


def test_triplets_of_eq3_use_the_distance_and_margin_of_the_base() -> None:
    run = small(name="fedhap", base_options={"distance": "euclidean", "margin": 0.25})
    assert run.protocol.triplets == triplet.Options(distance="euclidean", margin=0.25)
    assert objectives.options_of(run.context.objective) == run.protocol.triplets  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------------------------- paper's setting
def test_all_silos_hold_only_images_if_configured() -> None:
    names = [f"silo-{i:02d}" for i in range(20)]
    assert modalities(MissingModality(rate=1.0, only="image"), names, 0) == ((True, False),) * 20
    half = modalities(MissingModality(rate=0.5, only="text"), names, 0)
    assert sorted(set(half)) == [(False, True), (True, True)]
    assert half.count((False, True)) == 10


def test_image_queries_retrieve_images_from_the_database_only() -> None:
    labels = np.eye(4, dtype=np.uint8)[np.arange(8) % 4]
    image, text = np.where(np.eye(4) > 0, 1.0, -1.0)[np.arange(8) % 4].astype(np.float32), np.ones((8, 4), np.float32)
    items = Embedded(image, text, np.arange(8), labels, binary=True)
    plain = measure(Measured(items, Evaluation(gallery="database"), items))
    found = measure(Measured(items, Evaluation(gallery="database", within=True, map_at=(2,)), items))
    assert found["map_i2i"] == found["map_at2_i2i"] == 1.0
    assert found["map_t2t"] < 1.0
    assert "map_i2i" not in plain
    with pytest.raises(ValueError, match="within"):
        Evaluation(within=True)


def test_the_discriminator_takes_the_same_fraction_of_a_merge_step_as_the_model() -> None:
    run = small("triplet", "fedhap")
    run.round()
    before, after = run.state, run.protocol.merge(run.state, run.replies(), 1).state
    kept = run.protocol.mix_state(before, after, 0.25)
    steps = [state.tensors[fedhap._CHANGE] - before.tensors[fedhap._CHANGE] for state in (after, kept)]
    assert steps[0].any()
    torch.testing.assert_close(steps[1], 0.25 * steps[0])


@pytest.mark.slow
def test_with_two_label_levels_prototypes_are_of_the_lower_level() -> None:
    names = (f"{COARSE}a", f"{COARSE}b", "c", "d")
    run = small("shdch", "fedhap", labels=names)
    for _ in range(2):
        for reply in run.replies():
            assert payload_of(reply, ClassPrototypes).prototypes.shape == (2, 8)
        run.round()
    assert run.state.tensors[class_prototypes.GLOBAL].shape == (2, 8)


def test_unlabelled_training_data_and_codes_too_long_to_send_are_refused(tiny: Path, tmp_path: Path) -> None:
    with np.load(scenarios.load(tiny).data.path or "") as stored:
        arrays = dict(stored)
    labels = np.eye(5, dtype=np.uint8)[arrays["labels"]]
    np.savez(tmp_path / "set.npz", **{**arrays, "labels": labels * (arrays["split"] != "train")[:, None]})
    for setting, told in (
        (f"data.path={tmp_path / 'set.npz'}", "data: found 'training items without any label'"),
        (
            "objective={base: csq, bits: 65536, hidden: 65536}",
            "objective: found 'bits 65536, hidden 65536', allowed: a network that can be sent",
        ),
    ):
        run = run_of(resolved(tiny, "objective={base: csq, bits: 8, hidden: 16}", "protocol=fedavg", setting))
        with pytest.raises(InputError, match=told):
            preparation._can_start(run, run.scenario, build_population(run.scenario))
