"""Behaviour specific to PLFedCMH: silos and hypernetworks."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from fedmq.config.scenario import Objective
from fedmq.federation.protocol import Local, State
from fedmq.wire.payloads import ClassPrototypes, Delta, Model
from protocols import plfedcmh
from tests.replies import payload_of
from tests.small_federation import SmallFederation, population, share

TWO = ((True, True), (True, True))
GENERATOR = 7


def trained_world(rounds: int = 2, **arguments: Any) -> SmallFederation:
    run = population("plfedcmh", **arguments)
    for _ in range(rounds):
        run.round()
    return run


def small_network(silos: int = 3) -> tuple[torch.Tensor, Any, dict[str, slice]]:
    parts = {"one": slice(0, 2), "two": slice(2, 5)}
    shape = plfedcmh.network_layout(list(parts), silos)
    return plfedcmh.initial_network(shape, torch.Generator().manual_seed(GENERATOR)), shape, parts


def mixture(flat: torch.Tensor, shape: Any, parts: dict[str, slice], models: torch.Tensor) -> torch.Tensor:
    allowed = torch.ones(len(models), dtype=torch.bool)
    weights = plfedcmh.mixing_weights(plfedcmh.mixing_scores(flat, shape, list(parts)), allowed)
    return torch.cat(list(plfedcmh.mixed_blocks(weights, models, parts).values()))


# ------------------------------------------------------------------------- the hypernetwork
def test_a_block_is_a_layers_weight_and_bias_and_blocks_cover_the_branch() -> None:
    run = population("plfedcmh")
    for name in ("image", "text"):
        parts = plfedcmh.blocks(run.context.layout, run.model.branch(name))
        ordered = sorted(parts.values(), key=lambda part: part.start)
        branch = run.model.branch(name)
        assert (ordered[0].start, ordered[-1].stop) == (branch.start, branch.stop)
        assert all(a.stop == b.start for a, b in pairwise(ordered))
        by_name = run.context.layout.by_name
        for owner, part in parts.items():
            assert part.stop - part.start == by_name[f"{owner}.weight"].size + by_name[f"{owner}.bias"].size


def test_a_block_of_zeros_mixes_equally() -> None:
    weights = plfedcmh.mixing_weights(torch.zeros(1, 4), torch.tensor([True, True, False, True]))
    torch.testing.assert_close(weights, torch.tensor([[1 / 3, 1 / 3, 0, 1 / 3]]))


def test_the_step_is_the_gradient_of_the_mixture_along_the_direction() -> None:
    flat, shape, parts = small_network()
    models = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    direction = torch.randn(5, generator=torch.Generator().manual_seed(2))
    values = flat.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(mixture(values, shape, parts, models) @ direction, values)
    found = plfedcmh.network_gradient(
        flat, shape, parts, models=models, allowed=torch.ones(3, dtype=torch.bool), direction=direction
    )
    torch.testing.assert_close(found, gradient)


@pytest.mark.parametrize("sign", ["descent", "code"])
def test_hn_sign_descent_moves_a_mixture_along_the_update_and_code_against_it(sign: str) -> None:
    run = trained_world(2, options={"hn_sign": sign, "hn_rate": 0.01})
    silo = run.context.silos[0]
    reply = run.replies([silo])[0]
    update = torch.from_numpy(reply.payloads[0].buffer.copy())
    before = run.protocol.mixture(run.state, silo)
    merged = run.protocol.merge(run.state, [reply], 2).state
    kept = {name: each for name, each in run.state.tensors.items() if not name.startswith("hyper_")}
    only_networks = State(run.state.theta, {**merged.tensors, **kept})
    moved = float((run.protocol.mixture(only_networks, silo) - before) @ update)
    assert moved > 0 if sign == "descent" else moved < 0


# ------------------------------------------------------------------------- the coordinator


def test_a_silos_personal_model_is_the_received_model_plus_its_update() -> None:
    run = trained_world(1)
    silo = run.context.silos[0]
    sent = run.protocol.mixture(run.state, silo)
    reply = run.replies([silo])[0]
    after = run.protocol.merge(run.state, [reply], 1).state.tensors["table_models"][0]
    torch.testing.assert_close(after, sent + torch.from_numpy(reply.payloads[0].buffer.copy()))


def test_only_silos_with_a_branch_are_mixed_into_it() -> None:
    run = trained_world(1)
    spoilt = dict(run.state.tensors)
    spoilt["table_models"] = spoilt["table_models"].clone()
    spoilt["table_models"][2, run.model.branch("image")] = 1e6  # silo 2 has captions only
    for silo in run.context.silos:
        image = run.protocol.mixture(State(run.state.theta, spoilt), silo)[run.model.branch("image")]
        assert float(image.abs().max()) < 1e3


def test_a_silo_that_gains_or_loses_a_modality_is_mixed_by_the_branches_it_last_trained() -> None:
    run = trained_world(1)
    first, second = run.context.silos[:2]
    lost, gained = dataclasses.replace(first, text=False), dataclasses.replace(second, text=True)
    run.shares = {**run.shares, 0: share(lost, 11), 1: share(gained, 9)}

    def of_text() -> list[int]:
        """Silos whose text branch enters a mixture."""
        silo, found = run.context.silos[3], []
        part = run.model.branch("text")
        for index in range(4):
            models = run.state.tensors["table_models"].clone()
            models[index, part] += 1.0
            changed = State(run.state.theta, {**run.state.tensors, "table_models": models})
            if not torch.equal(run.protocol.mixture(changed, silo)[part], run.protocol.mixture(run.state, silo)[part]):
                found.append(index)
        return found

    assert of_text() == [0, 2, 3]
    run.round([lost, gained])
    assert of_text() == [1, 2, 3]


def test_the_hypernetwork_of_a_branch_the_silo_lacks_never_changes() -> None:
    run = population("plfedcmh")
    before = run.state.tensors["hyper_text"][1].clone()
    for _ in range(3):
        run.round()
    assert torch.equal(run.state.tensors["hyper_text"][1], before)
    assert not torch.equal(run.state.tensors["hyper_image"][1], population("plfedcmh").state.tensors["hyper_image"][1])


def test_a_stale_reply_moves_the_hypernetwork_less() -> None:
    run = trained_world(2, options={"hn_rate": 0.01})
    reply = run.replies(run.context.silos[:1])[0]
    start = run.state.tensors["hyper_image"][0]

    def moved(damping: float) -> float:
        given = dataclasses.replace(reply, damping=damping)
        return float((run.protocol.merge(run.state, [given], 2).state.tensors["hyper_image"][0] - start).norm())

    assert moved(0.5) == pytest.approx(0.5 * moved(1.0), rel=1e-2)


def test_a_stale_update_is_applied_to_the_model_that_the_silo_received() -> None:
    run = trained_world(2, options={"hn_rate": 0.01})
    silo, sent = run.context.silos[0], run.state
    reply = run.replies([silo])[0]
    fresh = run.protocol.merge(sent, [reply], 2).state
    run.round(run.context.silos[1:])
    stale = dataclasses.replace(reply, base=sent, staleness=1)
    merged = run.protocol.merge(run.state, [stale], 3).state
    update = torch.from_numpy(reply.payloads[0].buffer.copy())
    torch.testing.assert_close(merged.tensors["table_models"][0], run.protocol.mixture(sent, silo) + update)
    assert not torch.allclose(run.protocol.mixture(run.state, silo), run.protocol.mixture(sent, silo))
    step = fresh.tensors["hyper_image"][0] - sent.tensors["hyper_image"][0]
    assert step.any()
    torch.testing.assert_close(merged.tensors["hyper_image"][0], run.state.tensors["hyper_image"][0] + step)


def test_the_global_model_equals_fedavg_with_equal_weights() -> None:
    objective = Objective(base="shdch", bits=8, hidden=16)
    run, plain = (
        population(name, options, objective=objective)
        for name, options in (("plfedcmh", {}), ("fedavg", {"weighting": "uniform"}))
    )
    run.round()
    plain.round()
    assert torch.equal(run.state.theta, plain.state.theta)


# ------------------------------------------------------------------------- the silo


def test_a_sample_whose_classes_have_no_prototype_has_no_prototype_loss() -> None:
    features = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels, prototypes = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.ones(2, 4)
    options = plfedcmh.PlFedCmhOptions(beta=0.0)
    valid = torch.tensor([True, False])
    loss = plfedcmh.prototype_loss(features, features, labels, prototypes, valid, options)
    (gradient,) = torch.autograd.grad(loss, features)
    assert gradient[0].any()
    assert not gradient[1].any()


def test_prototypes_are_class_means_of_the_modalities_the_silo_has() -> None:
    run = population("plfedcmh", kinds=((True, False), (True, True)), sizes=(6, 6))
    reply = run.replies()[0]
    (found,) = [payload for payload in reply.payloads if isinstance(payload, ClassPrototypes)]
    image, text = np.split(found.prototypes, 2)
    counts = run.shares[0].labels.sum(0).numpy()
    assert np.array_equal(found.counts, np.concatenate([counts, np.zeros_like(counts)]))
    assert image[counts > 0].any()
    assert not text.any()


def test_a_silo_may_be_evaluated_with_its_last_trained_model() -> None:
    run = trained_world(options={"measured": "trained"}, kinds=TWO)
    silo = run.context.silos[0]
    sent = next(each for each in run.protocol.task(run.state, silo) if isinstance(each, Model)).buffer
    trained = run.train(silo)
    left = run.model.flat.detach().clone()
    delta = payload_of(run.reply(silo, trained), Delta).buffer
    assert delta.any()
    torch.testing.assert_close(left, torch.tensor(sent) + torch.tensor(delta))
    protocol = run.protocol
    payloads = protocol.task(run.state, silo)
    protocol.encoders(Local(silo, run.shares[0], run.model, run.personal[0]), payloads)
    assert torch.equal(run.model.flat.detach(), left)
    protocol.encoders(Local(silo, run.shares[0], run.model, {}), payloads)  # no personal model yet
    assert torch.equal(run.model.flat.detach(), torch.tensor(sent))
