"""CreamFL with averaged parameters and with a public set."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import numpy as np
import pytest
import torch

import protocols
from coordinator.updates import merged_state
from fedmq.config.scenario import Objective, ProtocolChoice
from fedmq.config.sections import Aggregation
from fedmq.errors import InputError
from fedmq.models.two_tower import Out
from protocols import creamfl
from tests.small_federation import population


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
        last = {"image": -banks[0] * scale}
        extra = creamfl.contrasts(shared, last, inter=1.0, intra=1.0, kd=0.0, tau=0.07, directions=directions)
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


def test_creamfl_with_a_public_set_refuses_data_without_one() -> None:
    context = dataclasses.replace(population("fedavg").context, public=lambda: None)
    with pytest.raises(InputError, match="public"):
        protocols.create(ProtocolChoice(name="creamfl_public"), context)
