"""The rivals' formulas against numpy versions written from their papers and official code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedmq.config.scenario import Objective
from fedmq.federation.protocol import Local
from fedmq.models.two_tower import Out
from fedmq.wire.payloads import PartialDelta
from protocols import creamfl, fedmekt, mfcpl, moon
from protocols.objectives import dchmt, dnph, dsph
from protocols.parts import aggregation, training
from protocols.parts.class_prototypes import Shared
from protocols.parts.personal_model import OWN
from tests.golden_checks import Inputs, inputs, t
from tests.replies import payload_of
from tests.small_federation import DIM, SmallFederation, population


@pytest.fixture(name="x")
def golden_inputs() -> Inputs:
    return inputs("baselines")


def log_softmax(z: np.ndarray) -> np.ndarray:
    return z - z.max(-1, keepdims=True) - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True))


# ------------------------------------------------------------------------------------------------------------ FedMEKT
def test_fedmekt_distils_embeddings_with_entries_of_mean_square_one(x: Inputs) -> None:
    student, teacher = (z / np.sqrt((z**2).mean(1, keepdims=True)) for z in (x["z"], x["teacher"]))
    wanted, given = log_softmax(teacher / 3), log_softmax(student / 3)
    expected = 9 * (np.exp(wanted) * (wanted - given)).sum(1).mean()
    # The length of the embeddings has no effect, as that of unit-length ones has none.
    given_codes, wanted_codes = fedmekt.rescaled(t(x["z"] / 7)), fedmekt.rescaled(t(x["teacher"]))
    assert float(fedmekt.divergence(given_codes, wanted_codes, 3.0)) == pytest.approx(expected, rel=1e-9)


def test_fedmekts_divergence_is_half_the_squared_distance_whatever_the_width() -> None:
    generator = torch.Generator().manual_seed(0)
    for width in (64, 4096):
        teacher = torch.nn.functional.normalize(torch.randn(16, width, generator=generator).double(), dim=1)
        near = torch.nn.functional.normalize(teacher + 0.1 * torch.randn(16, width, generator=generator) / width**0.5)
        found = fedmekt.divergence(fedmekt.rescaled(near), fedmekt.rescaled(teacher), 3.0)
        assert float(found) == pytest.approx(0.5 * float((near - teacher).square().sum(1).mean()), rel=0.1)


# ------------------------------------------------------------------------------------------------------------ pFedMMA
def test_a_pfedmma_silo_trains_its_adapters_and_nothing_else() -> None:
    frozen, trained = population("pfedmma"), population("pfedmma", {"heads": "personal"})
    layout = frozen.model.layout
    names = [entry.name for entry in layout.entries]
    for run, layers in ((frozen, [name for name in names if ".adapters." in name]), (trained, names)):
        run.train(run.eligible[0])
        moved = run.model.flat.detach() != run.model.initial()
        assert [name for name in names if any(moved[part].any() for part in layout.ranges([name]))] == layers


def test_pfedmmas_middle_layer_is_the_mean_of_the_silos_by_samples() -> None:
    run = population("pfedmma")
    replies = run.replies()
    updates = [payload_of(reply, PartialDelta) for reply in replies]
    trained = [update for update in updates if update.buffer.any()]  # in the first round single-modality silos idle
    layers = np.array([update.buffer for update in trained], np.float64)
    expected = np.average(layers, axis=0, weights=[update.n_samples for update in trained])
    merged = run.protocol.merge(run.state, replies, 0).state.theta
    change = aggregation.extract(merged - run.state.theta, run.model.layout, updates[0].names)
    np.testing.assert_allclose(change.numpy(), expected, rtol=1e-4, atol=1e-7)
    assert np.abs(expected).max() > 1e-4
    assert all(OWN in run.personal[reply.silo.index] for reply in replies)


def test_multi_modal_adapters_start_from_kaimings_values_except_the_up_projection() -> None:
    model, start = population("pfedmma").model, population("pfedmma").model.initial()
    for entry in model.layout.entries:
        if ".adapters." in entry.name and entry.name.endswith(".weight"):
            std = 0.01 if ".up." in entry.name else (2 / entry.shape[0]) ** 0.5
            (place,) = model.layout.ranges([entry.name])
            assert float(start[place].std()) == pytest.approx(std, rel=0.5)


# -------------------------------------------------------------------------------------------------------------- MFCPL
def unit(z: np.ndarray) -> np.ndarray:
    return z / np.linalg.norm(z, axis=-1, keepdims=True)


@pytest.mark.parametrize("has", [(True, True), (True, False), (False, True)])
def test_mfcpl_draws_the_mean_of_a_pair_and_contrasts_each_modality_with_the_complete_prototypes(
    x: Inputs, has: tuple[bool, bool]
) -> None:
    n, classes = len(x["y"]), len(x["protos"])
    known = np.array([1, 1, 0, 1], bool)  # class 2 has no prototype: its items have no term
    prototypes = np.stack([x["protos"], x["protos"][::-1]])
    codes = [unit(z) if there else None for z, there in zip((x["z"], x["zg"]), has, strict=True)]
    rows = [i for i in range(n) if known[x["y"][i]]]
    complete = prototypes.mean(0)
    shared = np.mean([z for z in codes if z is not None], axis=0)
    expected = 0.3 * np.mean([((shared[i] - complete[x["y"][i]]) ** 2).sum() for i in rows])
    kept = np.flatnonzero(known)
    for z in codes:
        if z is not None:
            scores = log_softmax(z @ unit(complete[known]).T / 0.2)
            expected += 0.7 * np.mean([-scores[i, int(np.flatnonzero(kept == x["y"][i])[0])] for i in rows])
    valid = torch.from_numpy(known)
    image, text = (None if z is None else t(z) for z in codes)
    terms = mfcpl.proto_terms(
        image,
        text,
        torch.nn.functional.one_hot(torch.from_numpy(x["y"]), classes).double(),
        Shared(t(prototypes[0]), t(prototypes[1]), valid, valid),
        mfcpl.MfcplOptions(cmpr=0.3, cmpc=0.7, proto_tau=0.2),
    )
    assert len(rows) < n
    assert float(torch.stack(terms).sum()) == pytest.approx(expected, rel=1e-9)


# ------------------------------------------------------------------------------------------------------ MOON, CreamFL
def test_moons_gradient_is_that_of_its_equation(x: Inputs) -> None:
    """By central differences of the equation, written as a fraction of exponentials."""

    def contrast(z: np.ndarray) -> float:
        cosines = [(unit(z) * unit(other)).sum(1) for other in (x["zg"], *x["zprev"])]
        likelihoods = np.exp(np.array(cosines) / 0.5)
        return float(-np.log(likelihoods[0] / likelihoods.sum(0)).mean())

    z = t(x["z"]).requires_grad_()
    value = moon.model_contrast(z, t(x["zg"]), list(t(x["zprev"])), 0.5)
    (gradient,) = torch.autograd.grad(value, z)
    assert float(value.detach()) == pytest.approx(contrast(x["z"]), rel=1e-12)
    for place in np.ndindex(2, 3):
        step = np.zeros_like(x["z"])
        step[place] = 1e-6
        slope = (contrast(x["z"] + step) - contrast(x["z"] - step)) / 2e-6
        assert float(gradient[place]) == pytest.approx(slope, abs=1e-8)


def test_creamfl_sums_the_contrast_between_modalities_and_averages_the_one_within(x: Inputs) -> None:
    codes, shared, last = (
        {"image": unit(image), "text": unit(text)} for image, text in zip(x["f"], (x["zg"], *x["zprev"]), strict=True)
    )
    rows, expected = np.array([4, 0, 7]), 0.0
    for name, other in (("image", "text"), ("text", "image")):
        z = codes[name][rows]
        expected -= 0.5 * log_softmax(z @ shared[other].T / 0.5)[np.arange(3), rows].mean()
    pairs = [(codes[m][rows] * each[m][rows]).sum(1) for each in (shared, last) for m in ("image", "text")]
    both = np.stack([np.concatenate(pairs[:2]), np.concatenate(pairs[2:])], 1)  # the code stacks both modalities
    expected -= 0.5 * log_softmax(both / 0.5)[:, 0].mean()
    tensors = ({name: t(z) for name, z in each.items()} for each in (shared, last))
    run = population("creamfl")
    local = Local(run.eligible[0], run.shares[0], run.model, {})
    terms = creamfl.contrasts(local, *tensors, inter=0.5, intra=0.5, kd=0.0, tau=0.5)
    assert terms is not None
    outs = [Out(*3 * (t(codes[name][rows]),)) for name in ("image", "text")]
    found = terms(training.Step(rows, None, lambda *_: torch.zeros(())), *outs)
    assert found is not None
    assert float(found) == pytest.approx(expected, rel=1e-9)


# -------------------------------------------------------------------------------------- hashing losses on CLIP features
def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.sqrt(((a[:, None] - b[None]) ** 2).sum(-1))


def dchmt_of(pairs: list[tuple[np.ndarray, np.ndarray]], shared: np.ndarray) -> float:
    """The official code's loss, of the softmax of two outputs per bit."""
    total, most = 0.0, np.sqrt(2 * pairs[0][0].shape[1] * 0.25)
    for a, b in ([np.exp(log_softmax(np.stack([u, 0 * u], -1))).reshape(len(u), -1) for u in pair] for pair in pairs):
        near = distance(a, b)
        apart = most * (1 - shared) - np.minimum(near * (1 - shared), most)
        total += ((near * shared) ** 2).mean() + (apart**2).mean()
    return total


def dnph_of(pairs: list[tuple[np.ndarray, np.ndarray]], shared: np.ndarray) -> float:
    count, total = shared.size / shared.sum(), 0.0
    for near in ((unit(a) @ unit(b).T + 1) / 2 for a, b in pairs):
        total += ((shared * near - 1) ** 2 + near**2 / count).sum() - (shared == 0).sum()
    return total


def dsph_of(codes: list[np.ndarray], proxies: np.ndarray, labels: np.ndarray, alpha: float, zeta: float) -> float:
    total, items = 0.0, range(len(labels))
    several = [(i, j) for i in items for j in items if min(labels[i].sum(), labels[j].sum()) > 1]
    irrelevant = [(i, j) for i, j in several if not (labels[i] * labels[j]).any()]
    for code in codes:
        near = unit(code) @ unit(proxies).T
        total += (1 - near[labels == 1]).mean() + np.maximum(near[labels == 0] - zeta, 0).mean()
    pairs = [(code, code) for code in codes] + ([(codes[0], codes[1])] if len(codes) == 2 else [])
    for a, b in pairs:
        total += alpha * np.mean([max(0.0, unit(a[i]) @ unit(b[j]) - zeta) for i, j in irrelevant])
    return total


@pytest.mark.parametrize("has", [(True, True), (True, False), (False, True)])
def test_the_hashing_losses_on_clip_features_are_those_of_the_official_codes(has: tuple[bool, bool]) -> None:
    drawn = np.random.default_rng(0)
    labels = (drawn.random((9, 5)) < 0.4).astype(float)
    shared, held = (labels @ labels.T > 0).astype(float), [drawn.normal(size=(9, 8)) if each else None for each in has]
    codes, proxies = [each for each in held if each is not None], drawn.normal(size=(5, 8))
    pairs = [(each, each) for each in codes] + ([(codes[0], codes[1])] if len(codes) == 2 else [])
    image, text = (None if each is None else t(each) for each in held)
    outs = [
        None if each is None else Out(each, each, each, F.normalize(each) @ F.normalize(t(proxies)).T)
        for each in (image, text)
    ]
    found = {
        "dchmt": (dchmt.loss(image, text, t(labels), 0.25), dchmt_of(pairs, shared)),
        "dnph": (dnph.loss(image, text, t(labels)), dnph_of(pairs, shared)),
        "dsph": (
            dsph.loss(dsph.Options(alpha=0.7, zeta=0.2), outs[0], outs[1], t(labels)),
            dsph_of(codes, proxies, labels, 0.7, 0.2),
        ),
    }
    for base, (value, wanted) in found.items():
        assert float(value) == pytest.approx(wanted, rel=1e-12), base


def test_dsphs_proxies_are_shared_by_both_towers_and_trained() -> None:
    run = population("fedavg", objective=Objective(base="dsph", bits=8, hidden=16))
    (place,) = run.model.layout.ranges(["shared.head.weight"])
    before = run.state.theta[place].clone()
    for modality, width in (("image", DIM), ("text", DIM)):
        out = run.model.outputs(modality, torch.ones(2, width))  # type: ignore[arg-type]
        assert out.logits is not None
        cosine = F.normalize(out.code) @ F.normalize(before.view(-1, 8)).T
        torch.testing.assert_close(out.logits, cosine)
    run.round()
    assert not torch.equal(run.state.theta[place], before)


# --------------------------------------------------------------------------------------------------------------- LoRA
def factors(run: SmallFederation, theta: torch.Tensor, tower: str) -> list[np.ndarray]:
    """B and A of a tower's adapter."""
    views = run.model.layout.views(np.ascontiguousarray(theta.numpy()))
    return [views[f"{tower}.adapters.00.{name}.weight"].astype(np.float64) for name in ("up", "down")]


def test_low_rank_adapters_on_features_add_their_product() -> None:
    run = population("ffalora")
    run.model.load(torch.randn(run.model.flat.shape, generator=torch.Generator().manual_seed(0)))
    (up, down), x = factors(run, run.model.flat.detach(), "visual"), torch.randn(5, DIM)
    adapter = run.model.visual.adapters["00"]  # type: ignore[union-attr, index]
    np.testing.assert_allclose(adapter(x).detach(), x.numpy() @ (np.eye(DIM) + 0.5 * up @ down).T, rtol=1e-4, atol=1e-4)


def test_with_ffa_lora_the_mean_of_the_silos_products_is_the_product_of_the_means() -> None:
    run = population("ffalora", kinds=((True, True),) * 3, sizes=(11, 9, 5))
    start = {tower: factors(run, run.state.theta, tower)[1] for tower in ("visual", "text")}
    for _ in range(3):
        replies = run.replies()
        products: dict[str, list[np.ndarray]] = {"visual": [], "text": []}
        for reply in replies:
            update = payload_of(reply, PartialDelta)
            assert update.names and not any(".down." in name for name in update.names)
            zero, change = torch.zeros_like(run.state.theta), torch.from_numpy(update.buffer.copy())
            own = run.state.theta + aggregation.inserted(zero, run.model.layout, update.names, change)
            for tower, of in products.items():
                up, down = factors(run, own, tower)
                of.append(up @ down)
        run.state, run.version = run.protocol.merge(run.state, replies, run.version).state, run.version + 1
        for tower, of in products.items():
            up, down = factors(run, run.state.theta, tower)
            np.testing.assert_array_equal(down, start[tower])
            np.testing.assert_allclose(up @ down, np.average(of, axis=0, weights=(11, 9, 5)), rtol=1e-4, atol=1e-7)
            assert np.abs(up).max() > 1e-4
    assert not run.protocol.traits().personalised


def test_with_fedsa_lora_a_is_averaged_and_b_and_heads_stay_at_the_silo() -> None:
    run = population("fedsalora", kinds=((True, True),) * 3, sizes=(11, 9, 5))
    for _ in range(2):
        before, replies = run.state.theta, run.replies()
        updates = [payload_of(reply, PartialDelta) for reply in replies]
        assert {name for update in updates for name in update.names} == {
            f"{tower}.adapters.00.down.weight" for tower in ("visual", "text")
        }
        mean = np.average([update.buffer.astype(np.float64) for update in updates], axis=0, weights=(11, 9, 5))
        run.state, run.version = run.protocol.merge(run.state, replies, run.version).state, run.version + 1
        change = aggregation.extract(run.state.theta - before, run.model.layout, updates[0].names)
        np.testing.assert_allclose(change.numpy(), mean, rtol=1e-3, atol=1e-7)
        assert np.abs(mean).max() > 1e-5
    assert not factors(run, run.state.theta, "text")[0].any()
    kept = [run.personal[i][OWN] for i in range(3)]
    assert not torch.equal(kept[0], kept[1]) and kept[0].any()
