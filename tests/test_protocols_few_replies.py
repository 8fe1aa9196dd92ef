"""Methods whose rules cover all replies of a round, where merges have fewer replies than a round."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import protocols
from fedmq.config.scenario import Objective, ProtocolChoice
from fedmq.errors import InputError
from fedmq.federation.protocol import Update
from fedmq.wire.payloads import ClassPrototypes, Loss
from tests import in_process_run
from tests.small_federation import SmallFederation, population
from tests.threaded_run import resolved

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
@pytest.mark.parametrize(
    ("given", "whole", "sums"),
    [
        (None, True, "reporters"),
        (None, False, "table"),
        ("reporters", False, "reporters"),
        ("table", True, "table"),
    ],
)
def test_sums_run_over_the_table_where_merges_are_of_few_replies_unless_configured(
    name: str, given: str | None, whole: bool, sums: str
) -> None:
    thetas = {}
    for label, options, rounds in (
        ("run", {"sums": given}, whole),
        ("reporters", {"sums": "reporters"}, True),
        ("table", {"sums": "table"}, True),
    ):
        run = configured_for(population(name, kinds=PAIRED), name, options, whole=rounds)
        replies = [with_loss(reply, 0.1 + reply.silo.index) for reply in run.replies()]
        state = run.protocol.merge(run.state, replies, 0).state
        few = [dataclasses.replace(reply, base_version=1) for reply in replies[1:]]
        thetas[label] = run.protocol.merge(state, few, 1).state.theta
    other = "reporters" if sums == "table" else "table"
    assert torch.equal(thetas["run"], thetas[sums])
    assert not torch.equal(thetas["run"], thetas[other])


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


def test_an_optional_number_may_be_null() -> None:
    kind = protocols.load("fedhap")
    assert protocols.options_of(kind, {"hysteresis": None}).hysteresis is None
    with pytest.raises(InputError, match=r"protocol\.hysteresis"):
        protocols.options_of(kind, {"hysteresis": -0.1})


@pytest.mark.parametrize("name", ["fedhap", "fedscmr", "fedcmr"])
@pytest.mark.parametrize(("mode", "whole"), [("sync", True), ("async", False)])
def test_methods_learn_whether_the_coordinator_has_rounds(
    name: str, mode: str, whole: bool, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = {"fedscmr": "{base: dscmr, enhance: true, bits: 8, hidden: 16}"}.get(
        name, "{base: dcmh, bits: 8, hidden: 16}"
    )
    kind = protocols.load(name)
    seen: list[bool] = []
    merge = kind.merge

    def watched(protocol: Any, *given: Any) -> Any:
        seen.append(getattr(protocol, "sums", None) == "reporters" or getattr(protocol, "hysteresis", None) == 0.0)
        return merge(protocol, *given)

    monkeypatch.setattr(kind, "merge", watched)
    settings = (f"protocol={name}", f"objective={objective}", "rounds=1", f"aggregation.mode={mode}")
    in_process_run.run(resolved(tiny, *settings), tmp_path)
    assert seen == [whole]
