"""Properties of every base loss; a new file in protocols/objectives/ is covered automatically."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import protocols
from fedmq.config.scenario import Objective, Training
from fedmq.errors import InputError
from fedmq.federation.protocol import Update
from fedmq.wire.payloads import Delta
from protocols import objectives
from protocols.parts.personal_model import OWN
from tests.replies import payload_of
from tests.small_federation import SmallFederation, population

BASES = protocols.losses()
UNSUPERVISED = {"dgcpn", "djsrh", "jdsh"}
ADAM = Training(optimizer="adam", batch_size=30, local_epochs=2, weight_decay=0.0)
LONE = ((True, True), (True, False), (False, True))


def small(base: str, name: str = "fedavg", **changes: Any) -> SmallFederation:
    objective = Objective.model_validate({"base": base, "bits": 8, "hidden": 16})
    return population(name, objective=objective, **changes)


def deltas(run: SmallFederation) -> list[np.ndarray]:
    return [payload_of(reply, Delta).buffer for reply in run.replies()]


@pytest.mark.parametrize("base", BASES)
def test_a_base_trains_exactly_the_branches_that_a_silo_has_even_on_one_item(base: str) -> None:
    for sizes in ([11, 9, 7], [1, 1, 1]):
        run = small(base, kinds=LONE, sizes=sizes, training=Training(optimizer="adam", batch_size=4))
        for _ in range(2):
            replies: list[Update] = run.replies()
            for reply in replies:
                delta = payload_of(reply, Delta).buffer
                for modality in ("image", "text"):
                    trains = bool(delta[run.model.branch(modality)].any())
                    assert trains == getattr(reply.silo, modality) or (sizes[0] == 1 and not trains), modality
            run.state, run.version = run.protocol.merge(run.state, replies, run.version).state, run.version + 1
        assert torch.isfinite(run.state.theta).all()


@pytest.mark.parametrize("base", BASES)
def test_a_base_needs_labels_or_ignores_them(base: str) -> None:
    run, blind = small(base), small(base)
    blind.shares = {index: replace(share, labels=None) for index, share in blind.shares.items()}
    if base in UNSUPERVISED:
        assert all(np.array_equal(one, other) for one, other in zip(deltas(run), deltas(blind), strict=True))
    else:
        with pytest.raises(InputError, match="labels"):
            blind.replies()


@pytest.mark.parametrize("base", BASES)
def test_a_base_lowers_its_loss(base: str) -> None:
    run = small(base, kinds=((True, True),), sizes=[60], training=ADAM)
    (silo,) = run.context.silos
    losses = []
    for _ in range(20):
        trained = run.train(silo, 3e-3)
        losses.append(trained.loss)
        run.state = run.protocol.merge(run.state, [run.reply(silo, trained)], run.version).state
        run.version += 1
    assert losses[-1] < (1 if base in UNSUPERVISED else 0.95) * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_general_methods_run_on_every_base(base: str) -> None:
    plain = small(base)
    for name in ("central", "fedprox", "local", "moon"):
        run = small(base, name)
        for _ in range(3):
            run.round()
        moved = run.personal[0][OWN] if name == "local" else run.state.theta
        assert torch.isfinite(moved).all() and not torch.equal(moved, run.model.initial())
    for _ in range(3):
        plain.round()
    apart = (run.state.theta - plain.state.theta).abs()
    for modality in ("image", "text"):  # MOON contrasts both towers
        assert float(apart[run.model.branch(modality)].max()) > 1e-5, modality


@pytest.mark.parametrize("option", ["a1", "coexistence", "no_such_option"])
def test_a_base_refuses_an_option_that_is_not_allowed(option: str) -> None:
    with pytest.raises(InputError, match=option):
        objectives.options_of(Objective(base="dgcpn", **{option: -1.0}))
