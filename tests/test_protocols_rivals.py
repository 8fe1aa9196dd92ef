"""The rivals' formulas against numpy versions written from their papers and official code."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedmq.federation.protocol import Local
from fedmq.models.two_tower import Out
from fedmq.wire.payloads import PartialDelta
from protocols import creamfl, fedmekt, mfcpl, moon
from protocols.parts import aggregation, training
from protocols.parts.class_prototypes import Shared
from protocols.parts.personal_model import OWN
from tests.golden_checks import Inputs, inputs, t
from tests.replies import payload_of
from tests.small_federation import population


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
