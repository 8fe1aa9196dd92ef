"""Weights of stale, lone and rare replies, computed manually: from the message to the merged state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coordinator.run_context import CostModel, RunContext
from coordinator.updates import merged_state, weighted
from fedmq.config.sections import Cost
from fedmq.federation.protocol import State, Update
from fedmq.storage.run_folder import RunFolder
from tests.small_federation import SmallFederation, population
from tests.threaded_run import resolved

PAIRED = ((True, True),) * 4
POLYNOMIAL = 3**-0.5


def setting(tiny: Path, run: SmallFederation, name: str, *changes: str) -> RunContext:
    scenario = resolved(tiny, f"protocol={name}", *changes)
    names = tuple(silo.name for silo in run.context.silos)
    cost = CostModel(Cost(), 0, names, 1, 1, 1)
    return RunContext(scenario, run.protocol, run.context, (11, 9, 7, 5), cost, RunFolder(tiny.parent))


def replies(run: SmallFederation, kept: RunContext, bases: tuple[int, ...], merged: Mapping[str, int]) -> list[Update]:
    """Each silo's reply to a task of the given version, as the method merges it into version 2."""
    found = []
    for silo, base in zip(run.context.silos, bases, strict=False):
        states = {version: State(run.state.theta + version) for version in range(3)}
        reply = weighted(kept, Update(silo, 7, base, 0, 1.0, run.train(silo).payloads), states, 2, merged)
        assert reply.base is states[base]
        found.append(reply)
    return found


HINGE = "aggregation.staleness={kind: hinge, slope: 10, grace: 1}"


@pytest.mark.parametrize(
    ("kind", "worth"),
    [
        ("aggregation.staleness.kind=constant", 1.0),
        ("aggregation.staleness={kind: polynomial, exponent: 0.5}", POLYNOMIAL),
        ("aggregation.staleness={kind: polynomial, exponent: 2}", 1 / 9),
        (HINGE, 1 / 11),
    ],
)
def test_a_reply_two_versions_old_is_weighted_by_the_scenarios_damping(tiny: Path, kind: str, worth: float) -> None:
    run = population("fedavg", kinds=PAIRED)
    kept = setting(tiny, run, "fedavg", "aggregation.mode=buffered", kind)
    stale, fresh = replies(run, kept, (0, 2), Counter())
    assert (stale.sequence, stale.base_version, stale.staleness) == (7, 0, 2)
    assert (stale.damping, stale.participation_weight, stale.factor) == (
        pytest.approx(worth),
        1.0,
        pytest.approx(worth),
    )
    assert (fresh.staleness, fresh.damping, fresh.factor) == (0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("silo", "merged", "worth"),
    [
        (1, {"silo-00": 6}, 2.5),  # 6 replies of 4 silos, 1.5 on average; this silo was never merged
        (0, {"silo-00": 6}, 2.5 / 7),
        (1, {"silo-00": 99}, 8.0),
        (1, dict.fromkeys(("silo-00", "silo-01", "silo-02", "silo-03"), 5), 1.0),
    ],
)
def test_rarity_is_relative_to_all_eligible_silos_not_only_merged_ones(
    tiny: Path, silo: int, merged: dict[str, int], worth: float
) -> None:
    run = population("fedavg", kinds=PAIRED)
    kept = setting(
        tiny, run, "fedavg", "aggregation={mode: buffered, balance: 8}", "aggregation.staleness.exponent=0.5"
    )
    reply = replies(run, kept, (0, 0), Counter(merged))[silo]
    assert reply.participation_weight == pytest.approx(worth)
    assert reply.factor == pytest.approx(worth * POLYNOMIAL)


def step_of(run: SmallFederation, reply: Update) -> Tensor:
    return reply.delta.double()


@pytest.mark.parametrize(
    ("changes", "merged", "rate"),
    [
        ("mode: async", {}, 0.6 * POLYNOMIAL),  # 0.6 is the default mixing
        ("mode: async, mixing: 0.25, staleness: {kind: constant}", {}, 0.25),
        ("mode: async, mixing: 0.5, staleness: {kind: hinge, slope: 10, grace: 1}", {}, 0.5 / 11),
        ("mode: async, mixing: 0.5, balance: 8", {"silo-01": 4}, 0.5 * POLYNOMIAL * 2),
        ("mode: async, mixing: 0.5, balance: 8", {"silo-01": 90}, 1.0),  # capped at the full step
    ],
)
def test_a_lone_stale_reply_moves_the_model_by_mixing_times_its_weight(
    tiny: Path, changes: str, merged: dict[str, int], rate: float
) -> None:
    run = population("fedavg", kinds=PAIRED)
    kept = setting(tiny, run, "fedavg", f"aggregation={{{changes}}}")
    (reply,) = replies(run, kept, (0,), Counter(merged))
    after, left_out = merged_state(kept, run.state, [reply], 2)
    expected = run.state.theta.double() + rate * step_of(run, reply)
    torch.testing.assert_close(after.state.theta, expected.float(), rtol=0, atol=1e-7)
    assert left_out == ()


def test_in_a_buffer_weights_balance_the_replies_and_only_mixing_scales_the_step(tiny: Path) -> None:
    run = population("fedavg", kinds=PAIRED)
    kept = setting(tiny, run, "fedavg", "aggregation={mode: buffered, mixing: 0.5, staleness: {exponent: 2}}")
    given = replies(run, kept, (0, 2), Counter())
    after, _ = merged_state(kept, run.state, given, 2)
    stale, fresh = (step_of(run, reply) for reply in given)
    step = (11 / 9 * stale + 9 * fresh) / (11 / 9 + 9)
    torch.testing.assert_close(after.state.theta, (run.state.theta + 0.5 * step).float(), rtol=0, atol=1e-7)
    # Replies of equal staleness have equal weights.
    after, _ = merged_state(kept, run.state, [replace(each, damping=0.1) for each in given], 2)
    step = (11 * stale + 9 * fresh) / 20
    torch.testing.assert_close(after.state.theta, (run.state.theta + 0.5 * step).float(), rtol=0, atol=1e-7)
