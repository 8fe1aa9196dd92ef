"""Methods whose rules cover all replies of a round, where merges have fewer replies than a round."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import protocols
from fedmq.config.scenario import Objective, ProtocolChoice
from fedmq.federation.protocol import Update
from fedmq.wire.payloads import ClassPrototypes, Loss
from tests.small_federation import SmallFederation, population

PAIRED = ((True, True),) * 3
HASHING = Objective(base="triplet", bits=8, hidden=16)


def configured_for(run: SmallFederation, name: str, options: dict[str, Any], *, whole: bool) -> SmallFederation:
    """The run, whose protocol is configured for merges of whole rounds or of few replies."""
    context = dataclasses.replace(run.context, whole_rounds=whole)
    run.protocol = protocols.create(ProtocolChoice(name=name, **options), context)
    return run


def with_loss(reply: Update, value: float) -> Update:
    payloads = tuple(Loss(value) if isinstance(each, Loss) else each for each in reply.payloads)
    return dataclasses.replace(reply, payloads=payloads)


@pytest.mark.parametrize("name", ["fedscmr", "fedcmr"])
def test_sums_run_over_the_table_where_merges_are_of_few_replies_unless_configured(name: str) -> None:
    def theta(sums: str | None, *, whole: bool) -> torch.Tensor:
        run = configured_for(population(name, kinds=PAIRED), name, {"sums": sums}, whole=whole)
        replies = [with_loss(reply, 0.1 + reply.silo.index) for reply in run.replies()]
        state = run.protocol.merge(run.state, replies, 0).state
        few = [dataclasses.replace(reply, base_version=1) for reply in replies[1:]]
        return run.protocol.merge(state, few, 1).state.theta

    reporters, table = theta("reporters", whole=True), theta("table", whole=False)
    assert not torch.equal(reporters, table)
    for sums, whole, expected in (
        (None, True, reporters),
        (None, False, table),
        ("reporters", False, reporters),
        ("table", True, table),
    ):
        assert torch.equal(theta(sums, whole=whole), expected), (sums, whole)


@pytest.mark.parametrize(
    ("options", "whole", "flips"),
    [({}, True, True), ({}, False, False), ({"hysteresis": 0.0}, False, True), ({"hysteresis": 0.05}, True, False)],
)
def test_a_bit_near_a_tie_is_kept_where_merges_are_of_few_replies_unless_configured(
    options: dict[str, Any], whole: bool, flips: bool
) -> None:
    run = configured_for(population("fedhap", kinds=PAIRED, objective=HASHING), "fedhap", options, whole=whole)
    replies = run.replies()

    def voting(sign: float) -> list[Update]:
        """Every silo's class means, with every bit close to a tie."""
        return [
            dataclasses.replace(
                reply,
                payloads=tuple(
                    ClassPrototypes(
                        np.full_like(each.prototypes, sign * 0.03), np.ones_like(each.counts), each.modality
                    )
                    if isinstance(each, ClassPrototypes)
                    else each
                    for each in reply.payloads
                ),
            )
            for reply in replies
        ]

    state = run.protocol.merge(run.state, voting(1.0), 0).state
    assert (state.tensors["fedhap.prototypes"] == 1).all()  # the first vote counts however close to a tie
    after = run.protocol.merge(state, voting(-1.0), 0).state.tensors["fedhap.prototypes"]
    assert (after == (-1 if flips else 1)).all()
