"""CreamFL with averaged parameters and with a public set."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import numpy as np
import pytest
import torch

import protocols
from coordinator.aggregation import merged_state
from fedmq.config.scenario import Objective, ProtocolChoice
from fedmq.config.sections import Aggregation
from fedmq.errors import InputError
from fedmq.models.two_tower import Out
from fedmq.wire.payloads import Loss, Representations
from protocols import creamfl, creamfl_public
from tests.replies import payload_of
from tests.small_federation import DIM, population


def test_the_bank_is_a_moving_average_of_downloaded_models_embeddings_and_stays_in_the_silo() -> None:
    run = population("creamfl", {"bank_ema": 0.75}, kinds=((True, True),), sizes=(6,))
    assert run.protocol.uploads(run.eligible[0]) == population("fedavg").protocol.uploads(run.eligible[0])
    said = []
    for _ in range(2):
        run.model.load(run.state.theta)
        said.append(run.model.image(run.shares[0].image).detach())
        run.round()
    torch.testing.assert_close(run.personal[0]["creamfl_bank_image"], 0.75 * said[0] + 0.25 * said[1])


def test_creamfl_contrasts_directions_whatever_the_length_of_codes() -> None:
    generator = torch.Generator().manual_seed(0)
    z, banks = torch.randn(6, 32, generator=generator), torch.randn(2, 6, 32, generator=generator)
    step = types.SimpleNamespace(rows=np.arange(6))

    def terms(scale: float, directions: bool) -> float:
        shared = {"image": banks[0] * scale, "text": banks[1] * scale}
        weights = creamfl.Weights(1.0, 1.0, 0.0, 0.07, directions)
        extra = creamfl.contrasts(shared, {"image": -banks[0] * scale}, weights)
        found = extra(step, Out(z, z, z * scale), None)  # type: ignore[arg-type, misc]
        assert found is not None
        return float(found)

    assert terms(10.0, True) == pytest.approx(terms(1.0, True), rel=1e-4)
    assert terms(1.0, True) < 20
    assert terms(10.0, False) > 100
    objective = Objective(base="dcmh", bits=8, hidden=16)
    runs = [population(name, objective=objective) for name in ("creamfl", "fedavg")]
    hashing = [run.train(run.context.silos[0]).loss for run in runs]
    assert (
        hashing[0] - hashing[1] < 20
    )  # each of the two contrasts of unit vectors at temperature .07 is at most 2 / .07 + log n


def test_a_silo_whose_data_changed_starts_a_new_bank() -> None:
    run = population("creamfl", kinds=((True, True),), sizes=(6,))
    run.round()
    run.shares = {0: dataclasses.replace(run.shares[0], rows=run.shares[0].rows + 1)}
    run.model.load(run.state.theta)
    said = run.model.image(run.shares[0].image).detach()
    run.round()
    torch.testing.assert_close(run.personal[0]["creamfl_bank_image"], said)


def test_with_a_public_set_representations_are_sent_and_parameters_are_not() -> None:
    run = population("creamfl_public")
    items = len(run.protocol.public)  # type: ignore[attr-defined]
    for _ in range(2):
        for reply in run.replies():
            sent = payload_of(reply, Representations)
            assert sent.values.shape == (items * (2 if reply.silo.paired else 1), DIM)
            assert {type(payload) for payload in reply.payloads} == {Representations, Loss}
        run.round()
        (down,) = run.protocol.task(run.state, run.eligible[0])
        run.model.load(run.state.theta)
        said = run.model.image(run.protocol.public.image).detach()  # type: ignore[attr-defined]
        torch.testing.assert_close(torch.from_numpy(down.values[:items].astype(np.float32)), said, atol=1e-3, rtol=0)


def test_representations_sent_down_are_those_of_the_partially_mixed_model() -> None:
    run = population("creamfl_public", {"server_rate": 1e-2})
    aggregation = Aggregation(mode="async", mixing=0.3)
    setting: Any = types.SimpleNamespace(
        protocol=run.protocol, context=run.context, scenario=types.SimpleNamespace(aggregation=aggregation)
    )
    merged, _ = merged_state(setting, run.state, run.replies(run.eligible[:1]), 0)
    run.model.load(merged.state.theta)
    said = run.model.image(run.protocol.public.image).detach()  # type: ignore[attr-defined]
    torch.testing.assert_close(merged.state.tensors["public_image"], said)
    whole = run.protocol.merge(run.state, run.replies(run.eligible[:1]), 0).state
    assert not torch.allclose(whole.tensors["public_image"], said)


def test_the_coordinator_trains_on_public_data_where_no_silo_sends_a_modality() -> None:
    run = population("creamfl_public", kinds=((True, False),), sizes=(5,))
    log = run.round()
    assert log["server_loss"] > 0
    assert not torch.equal(run.state.theta, run.model.initial())


def test_a_silo_whose_representation_retrieves_its_pair_is_weighted_more() -> None:
    shared = torch.eye(3)
    good, bad = 5 * torch.eye(3), 5 * torch.eye(3).roll(1, 0)
    weights = creamfl_public.item_weights(torch.stack([good, bad]), shared)
    assert (weights[0] > 0.9).all()
    torch.testing.assert_close(weights.sum(0), torch.ones(3))


def test_creamfl_with_a_public_set_refuses_data_without_one() -> None:
    context = dataclasses.replace(population("fedavg").context, public=lambda: None)
    with pytest.raises(InputError, match="public"):
        protocols.create(ProtocolChoice(name="creamfl_public"), context)
