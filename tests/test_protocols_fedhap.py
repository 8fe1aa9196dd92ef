"""FedHAP, its triplets and discriminator, and the hashing bases it is compared on."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coordinator import program
from fedmq.config import resolve as scenarios
from fedmq.config.scenario import MissingModality, Objective, Training
from fedmq.config.sections import Evaluation
from fedmq.data.labels import COARSE
from fedmq.data.partition import modalities
from fedmq.errors import InputError
from fedmq.evaluation.gallery_ranking import Embedded
from fedmq.evaluation.metrics import Measured, measure
from fedmq.federation.population import build_population
from fedmq.federation.protocol import Update
from fedmq.models.hash_networks import signs, straight_through
from fedmq.models.two_tower import Out
from fedmq.wire.payloads import ClassPrototypes, Delta, DiscriminatorDelta
from protocols import fedhap, objectives
from protocols.objectives import csq, dch, dpsh, greedyhash, triplet
from protocols.parts import class_prototypes
from protocols.parts import discriminator as adversary
from protocols.parts.labelled import samples_of
from tests.small_federation import LABELS, SmallFederation, population
from tests.threaded_run import resolved

BASES = ("triplet", "dpsh", "dch", "greedyhash", "csq")
every_base = pytest.mark.parametrize("base", BASES)
ADAM = Training(optimizer="adam", batch_size=4, local_epochs=2, weight_decay=0.0)
LONE = ((True, True), (True, False), (False, True))
IMAGES = ((True, False),) * 3
OFF = {"proto_triplet": False, "discriminator": False}


def small(
    base: str = "triplet", name: str = "fedavg", options: dict[str, Any] | None = None, **changes: Any
) -> SmallFederation:
    objective = Objective(base=base, bits=changes.pop("bits", 8), hidden=16, **changes.pop("base_options", {}))
    return population(name, options, objective=objective, **{"training": ADAM, **changes})


def payload(reply: Update, kind: type[Any]) -> Any:
    (found,) = [each for each in reply.payloads if isinstance(each, kind)]
    return found


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


def test_the_euclidean_margin_grows_with_the_code_length() -> None:
    options = triplet.Options(distance="euclidean")
    assert options.margin_for(48) == pytest.approx(6.0)
    assert triplet.Options().margin_for(48) == pytest.approx(0.5)


def test_the_euclidean_distance_has_a_gradient_where_codes_are_equal() -> None:
    codes = torch.ones(3, 4, requires_grad=True)
    triplet.distances(codes, codes, "euclidean").sum().backward()
    assert codes.grad is not None
    assert torch.isfinite(codes.grad).all()


# --------------------------------------------------------------------------------------------------- bases
@every_base
def test_a_base_trains_exactly_the_branches_that_a_silo_has(base: str) -> None:
    run = small(base, kinds=LONE)
    for reply in run.replies():
        delta = payload(reply, Delta).buffer
        for modality in ("image", "text"):
            assert bool(delta[run.model.branch(modality)].any()) == getattr(reply.silo, modality)


@every_base
def test_a_base_trains_a_silo_of_one_item(base: str) -> None:
    run = small(base, kinds=LONE, sizes=[1, 1, 1])
    for _ in range(2):
        run.round()
    assert torch.isfinite(run.state.theta).all()


@every_base
def test_a_base_learns_its_labels_in_both_modalities(base: str) -> None:
    run = small(base, kinds=((True, True),), sizes=[60], training=replace_batch(ADAM, 30), bits=16)
    (silo,) = run.context.silos
    losses = []
    for _ in range(20):
        trained = run.train(silo, 3e-3)
        losses.append(trained.loss)
        run.state = run.protocol.merge(run.state, [run.reply(silo, trained)], run.version).state
        run.version += 1
    assert losses[-1] < 0.8 * losses[0]


def replace_batch(training: Training, size: int) -> Training:
    return training.model_copy(update={"batch_size": size})


@every_base
def test_data_without_labels_are_refused(base: str) -> None:
    run = small(base)
    run.shares = {index: replace(each, labels=None) for index, each in run.shares.items()}
    with pytest.raises(InputError, match="labels"):
        run.train(run.context.silos[0])


def test_dpshs_bank_holds_the_last_code_of_every_sample_and_persists() -> None:
    run = small("dpsh", kinds=LONE, sizes=[9, 7, 5])
    for index, silo in enumerate(run.context.silos):
        state = run.train(silo).state
        banks = {name.removeprefix("base.bank."): bank for name, bank in state.items() if name != "base.bank.rows"}
        assert set(banks) == {modality for modality in ("image", "text") if getattr(silo, modality)}
        before = {name: bank.clone() for name, bank in banks.items()}
        for bank in banks.values():
            assert bank.shape == ([9, 7, 5][index], 8)
            assert (bank != 0).any(1).all()
        run.train(silo)
        assert all(
            torch.equal(banks[name], before[name]) for name in banks
        )  # a task does not modify the state it received


def test_a_bank_is_reset_when_the_items_change() -> None:
    run = small("dpsh", kinds=((True, True),), sizes=[9])
    (silo,) = run.context.silos
    fresh = run.train(silo)
    old = {**fresh.state, "base.bank.image": fresh.state["base.bank.image"] + 5}
    deltas = []
    for rows in (run.shares[0].rows, run.shares[0].rows + 100):
        run.shares = {0: replace(run.shares[0], rows=rows)}
        run.personal[0] = old
        deltas.append(payload(run.reply(silo, run.train(silo)), Delta).buffer)
    assert not np.array_equal(deltas[0], payload(run.reply(silo, fresh), Delta).buffer)
    assert np.array_equal(deltas[1], payload(run.reply(silo, fresh), Delta).buffer)


def test_an_empty_bank_contributes_no_pair_gradient() -> None:
    codes = random_codes(4, 8).requires_grad_()
    labels = torch.eye(4)
    dpsh.loss(codes, labels, torch.zeros(6, 8), torch.ones(6, 4), alpha=0.0).backward()
    assert codes.grad is not None
    assert not codes.grad.any()


def test_dch_is_finite_where_all_codes_are_equal() -> None:
    codes = torch.ones(3, 8, requires_grad=True)
    lost = dch.loss(codes, torch.ones(3, 2), dch.Options())
    lost.backward()
    assert torch.isfinite(lost)
    assert codes.grad is not None and torch.isfinite(codes.grad).all()


def test_greedyhash_shares_one_classifier_between_modalities_and_every_silo_trains_it() -> None:
    run = small("greedyhash", kinds=LONE)
    shared = run.model.branch("shared")
    assert shared.stop - shared.start == 8 * len(LABELS)
    assert all(payload(reply, Delta).buffer[shared].any() for reply in run.replies())


def test_several_labels_share_the_target_or_the_first_label_is_the_target() -> None:
    labels = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    soft = torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    first = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert torch.equal(greedyhash.targets(labels, "soft"), soft)
    assert torch.equal(greedyhash.targets(labels, "first"), first)


@pytest.mark.parametrize(("classes", "bits"), [(10, 12), (24, 24), (80, 48), (40, 16), (3, 5), (1, 12)])
def test_hash_centres_are_balanced_and_far_apart_for_any_length(classes: int, bits: int) -> None:
    centres = csq.hash_centres(classes, bits, np.random.default_rng(0))
    assert centres.shape == (classes, bits)
    assert set(centres.unique().tolist()) <= {-1.0, 1.0}
    assert (centres.sum(1).abs() <= bits % 2).all()
    again = csq.hash_centres(classes, bits, np.random.default_rng(0))
    assert torch.equal(centres, again)


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


@pytest.mark.parametrize("bits", [16, 64])
def test_hash_centres_of_a_power_of_two_are_rows_of_a_hadamard_matrix(bits: int) -> None:
    centres = csq.hash_centres(10, bits, np.random.default_rng(0))
    assert torch.equal(centres @ centres.T, bits * torch.eye(10))


@pytest.mark.parametrize("seed", range(6))
def test_hash_centres_are_distinct_even_where_few_bits_encode_many_classes(seed: int) -> None:
    centres = csq.hash_centres(80, 12, np.random.default_rng(seed))
    assert len(np.unique(centres.numpy(), axis=0)) == 80
    assert (centres.sum(1) == 0).all()


def test_random_hash_centres_of_24_bits_differ_in_more_than_a_quarter_of_the_bits() -> None:
    centres = csq.hash_centres(10, 24, np.random.default_rng(0))
    assert all(int((a != b).sum()) > 6 for a, b in combinations(centres, 2))


# --------------------------------------------------------------------------------------------------- signs
def test_the_sign_of_zero_is_one_and_the_straight_through_sign_is_exact() -> None:
    codes = torch.tensor([0.0, -0.0, 0.3, -7.1, 1e-30]).requires_grad_()
    assert signs(codes).tolist() == [1, 1, 1, -1, 1]
    passed = straight_through(codes)
    assert passed.tolist() == [1, 1, 1, -1, 1]
    (passed * torch.arange(5.0)).sum().backward()
    assert codes.grad is not None
    assert codes.grad.tolist() == [0, 1, 2, 3, 4]


# --------------------------------------------------------------------------------------------------- FedHAP
@every_base
def test_with_its_switches_off_fedhap_equals_uniform_fedavg_to_the_bit(base: str) -> None:
    runs = [small(base, "fedhap", OFF), small(base, "fedavg", {"weighting": "uniform"})]
    for _ in range(3):
        for run in runs:
            run.round()
    assert torch.equal(runs[0].state.theta, runs[1].state.theta)
    silo = runs[0].context.silos[0]
    assert runs[0].protocol.uploads(silo) == runs[1].protocol.uploads(silo)


@pytest.mark.parametrize(
    "switches",
    [{"proto_triplet": True, "discriminator": False}, {"proto_triplet": False, "discriminator": True}],
    ids=["FedHAP-3", "FedHAP-2"],
)
def test_prototypes_have_an_effect_from_the_second_round_on(switches: dict[str, bool]) -> None:
    runs = [small(name="fedhap", options=options) for options in (OFF, switches)]
    for run in runs:
        run.round()
    assert torch.equal(runs[0].state.theta, runs[1].state.theta)
    for run in runs:
        run.round()
    assert not torch.equal(runs[0].state.theta, runs[1].state.theta)


def test_aggregation_weights_are_uniform_whatever_the_silo_sizes() -> None:
    run = small(name="fedhap", options=OFF, kinds=IMAGES, sizes=[3, 7, 20])
    replies = run.replies()
    moved = run.protocol.merge(run.state, replies, 0).state.theta - run.state.theta
    mean = np.mean([payload(reply, Delta).buffer for reply in replies], axis=0)
    np.testing.assert_allclose(moved.numpy(), mean, atol=1e-6)


def test_image_only_silos_train_and_the_text_tower_is_unchanged() -> None:
    run = small(name="fedhap", kinds=IMAGES)
    start = run.state.theta.clone()
    for _ in range(2):
        run.round()
    text = run.model.branch("text")
    assert torch.equal(run.state.theta[text], start[text])
    assert not torch.equal(run.state.theta, start)


@pytest.mark.parametrize("bits", [12, 24, 48])
def test_every_code_length_of_the_paper_runs(bits: int) -> None:
    run = small(name="fedhap", bits=bits)
    for _ in range(2):
        run.round()
    prototypes = run.state.tensors["fedhap.prototypes"]
    assert prototypes.shape == (len(LABELS), bits)


def test_a_silo_votes_with_the_mean_code_of_its_modalities() -> None:
    run = small(name="fedhap", kinds=LONE)
    for reply in run.replies():
        vote = payload(reply, ClassPrototypes)
        labels = run.shares[reply.silo.index].labels
        assert labels is not None
        held = reply.silo.image + reply.silo.text
        assert vote.modality == ("both" if held == 2 else "image" if reply.silo.image else "text")
        assert vote.counts.tolist() == (held * labels.sum(0)).tolist()
        assert not vote.prototypes[vote.counts == 0].any()


def test_silos_report_class_presence_instead_of_counts_if_configured() -> None:
    run = small(name="fedhap", options={"proto_counts": False})
    counts = np.stack([payload(reply, ClassPrototypes).counts for reply in run.replies()])
    assert set(counts.ravel().tolist()) == {0, 1}


def test_a_prototype_is_the_sign_of_the_mean_over_the_silos_that_hold_the_class() -> None:
    run = small(name="fedhap")
    votes = [payload(reply, ClassPrototypes) for reply in run.replies()]
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
    layout = adversary.layout_of(8, 4, 16)
    prototypes, labels = signs(random_codes(4, 8)), torch.eye(4)
    training = Training(optimizer="adam", weight_decay=0.0)
    start = adversary.initial(layout, seed=0)
    found = adversary.Discriminator(start, layout, prototypes, labels, training, 0.01)
    codes, own = signs(random_codes(20, 8, seed=1)), torch.eye(4).repeat(5, 1)
    before = float(found.fooled(codes, own, "nonsat", "corrected"))
    for _ in range(100):
        found.step(codes, own, "corrected")
    assert float(found.fooled(codes, own, "nonsat", "corrected")) > before + 1
    assert torch.equal(start, adversary.initial(layout, seed=0))


@pytest.mark.parametrize("adv_g", ["nonsat", "minimax"])
def test_the_network_learns_codes_that_the_discriminator_mistakes_for_prototypes(adv_g: adversary.Adversarial) -> None:
    layout = adversary.layout_of(8, 4, 16)
    theta = adversary.initial(layout, seed=0)
    labels = torch.eye(4)
    found = adversary.Discriminator(theta, layout, signs(random_codes(4, 8)), labels, Training(), 0.01)
    codes = random_codes(4, 8, seed=1).requires_grad_()
    found.fooled(straight_through(codes), labels, adv_g, "corrected").backward()
    assert codes.grad is not None
    step = signs(codes.detach()) - 1e-2 * codes.grad
    better = adversary.logits(theta, layout, step, labels)
    assert (better >= adversary.logits(theta, layout, signs(codes.detach()), labels)).all()


def test_the_literal_adversarial_loss_has_the_opposite_gradient() -> None:
    local, prototypes = torch.tensor([0.3, -0.2]).requires_grad_(), torch.zeros(3)
    gradients = [
        torch.autograd.grad(adversary.generator_loss(local, prototypes, kind), local)[0]
        for kind in ("nonsat", "minimax", "literal")
    ]
    assert (gradients[0] < 0).all()
    assert (gradients[1] < 0).all()
    assert (gradients[2] > 0).all()


def test_shared_discriminators_are_averaged_uniformly_and_sent_as_updates() -> None:
    run = small(name="fedhap")
    run.round()
    replies = run.replies()
    state = run.protocol.merge(run.state, replies, 1).state
    changes = [payload(reply, DiscriminatorDelta).buffer for reply in replies]
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
    assert not torch.equal(kept, adversary.initial(layout, run.context.seed))


@pytest.mark.parametrize("changes", [{"adv_input": "relaxed"}, {"adv_g": "literal"}, {"eq8": "printed"}])
def test_each_variant_of_the_adversarial_loss_changes_the_trained_model(changes: dict[str, str]) -> None:
    runs = [small(name="fedhap", options=options) for options in ({}, changes)]
    for run in runs:
        run.round()
        run.round()
    assert not torch.equal(runs[0].state.theta, runs[1].state.theta)


def test_fedhap_refuses_data_without_labels_unless_its_switches_are_off() -> None:
    run = small("dgcpn")
    context = replace(run.context, label_names=())
    with pytest.raises(InputError, match="no labels"):
        fedhap.FedHap(fedhap.FedHapOptions(), context)
    fedhap.FedHap(fedhap.FedHapOptions(**OFF), context)


def test_triplets_of_eq3_use_the_distance_and_margin_of_the_base() -> None:
    run = small(name="fedhap", base_options={"distance": "euclidean", "margin": 0.25})
    assert run.protocol.triplets == triplet.Options(distance="euclidean", margin=0.25)
    assert objectives.options_of(run.context.objective) == run.protocol.triplets  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------------------------- paper's setting
def test_all_silos_hold_only_images_if_configured() -> None:
    names = [f"silo-{i:02d}" for i in range(20)]
    assert modalities(MissingModality(rate=1.0, only="image"), names) == ((True, False),) * 20
    half = modalities(MissingModality(rate=0.5, only="text"), names)
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
            assert payload(reply, ClassPrototypes).prototypes.shape == (2, 8)
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
            "objective.bits=1000000000",
            "objective: found 'bits 1000000000, hidden 16', allowed: a network that can be sent",
        ),
    ):
        scenario = resolved(tiny, "objective={base: csq, bits: 8, hidden: 16}", "protocol=fedavg", setting)
        with pytest.raises(InputError, match=told):
            program.check(scenario, build_population(scenario))
