"""The weight of single-modality silos' replies (``aggregation.single_weight``), for every method that has one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import protocols
from coordinator.updates import merged_state
from fedmq.config.scenario import Objective
from fedmq.config.sections import Robust
from fedmq.errors import InputError
from fedmq.federation.protocol import Update
from protocols.parts.robust import robust_replies
from tests.small_federation import SmallFederation, population
from tests.test_federation_staleness import replies, setting
from tests.threaded_run import resolved

METHODS = {name: protocols.load(name) for name in protocols.names()}
NAMES = [name for name, kind in METHODS.items() if kind.traits_of(kind.Options()).weighs_single_silos]
#: It trains the model at the coordinator, on public items, so that no reply has to count for it to change.
AT_THE_COORDINATOR = {"creamfl_public"}


def weighted(given: Sequence[Update], factor: float) -> list[Update]:
    return [replace(each, modality_weight=1.0 if each.silo.paired else factor) for each in given]


def test_every_method_that_averages_updates_by_their_factor_has_the_weight() -> None:
    without = METHODS.keys() - set(NAMES)
    assert without == {"local", "central", "fedproto", "plfedcmh", "paired_only", "matched_control"}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in AT_THE_COORDINATOR])
def test_the_weight_changes_a_merge_with_both_kinds_of_silos(name: str) -> None:
    run = population(name, {"warmup": 0.0} if name == "fedbridge" else {})
    run.round()  # before, single-modality silos have nothing to be trained towards
    given = run.replies()
    full, part = (run.protocol.merge(run.state, weighted(given, factor), 1).state for factor in (1.0, 0.2))
    assert float((full.theta - part.theta).abs().max()) > 1e-5


@pytest.mark.parametrize("name", [name for name in NAMES if name not in AT_THE_COORDINATOR])
def test_a_merge_of_replies_that_do_not_count_leaves_the_model_unchanged(name: str) -> None:
    run = population(name)
    void = [reply for reply in weighted(run.replies(), 0.0) if not reply.silo.paired]
    state = run.protocol.merge(run.state, void, 0).state
    assert torch.equal(state.theta, run.state.theta)
    assert all(torch.isfinite(tensor).all() for tensor in state.tensors.values() if tensor.is_floating_point())


def test_the_representations_of_replies_that_do_not_count_are_not_distilled() -> None:
    run = population("creamfl_public")
    given = weighted(run.replies(), 0.0)
    paired = [reply for reply in given if reply.silo.paired]
    void = [reply for reply in given if not reply.silo.paired]
    assert run.protocol.targets(run.state, void) == {}  # type: ignore[attr-defined]
    both, alone = (run.protocol.targets(run.state, each) for each in (given, paired))  # type: ignore[attr-defined]
    assert all(torch.equal(both[name], alone[name]) for name in ("image", "text"))


def test_fedcafe_gives_replies_of_factor_0_nothing_of_a_stale_silos_excess() -> None:
    run = population("fedcafe", {"cap": 1.0})
    given = [replace(each, staleness=1) for each in weighted(run.replies(), 0.0)[:3]]
    weights = run.protocol._weights(torch.ones(3, dtype=torch.float64), given)  # type: ignore[attr-defined]
    assert weights.tolist() == [1.0, 0.0, 0.0]


def test_the_coordinator_weights_only_single_modality_silos(tiny: Path) -> None:
    run = population("fedavg")
    kept = setting(tiny, run, "fedavg", "aggregation.single_weight=0.2")
    assert [reply.factor for reply in replies(run, kept, (2, 2, 2, 2), Counter())] == [1.0, 0.2, 0.2, 1.0]


def test_in_async_mode_the_weight_scales_the_step(tiny: Path) -> None:
    run = population("fedavg")
    run.round()  # before, no prototype to be anchored to is known
    steps = []
    for factor in (1, 0.25, 0):
        kept = setting(tiny, run, "fedavg", f"aggregation={{mode: async, single_weight: {factor}}}")
        alone = replies(run, kept, (2, 2), Counter())[1:]
        steps.append(merged_state(kept, run.state, alone, 2)[0].state.theta - run.state.theta)
    whole, quarter, nothing = steps
    torch.testing.assert_close(quarter, 0.25 * whole, rtol=0, atol=1e-7)
    assert bool(whole.any())
    assert not bool(nothing.any())


def test_robust_rules_do_not_compare_replies_of_factor_0() -> None:
    run = population("fedavg", kinds=[(True, True)] * 3 + [(True, False)])
    run.round()
    given = weighted(run.replies(), 0.0)
    median = Robust(rule="median")
    together, alone = (robust_replies(each, median, run.context.layout) for each in (given, given[:3]))
    assert together[3] is given[3]
    for one, other in zip(together[:3], alone, strict=True):
        assert torch.equal(one.delta, other.delta)


@pytest.mark.parametrize("name", ["local", "fedproto", "plfedcmh", "paired_only"])
def test_a_method_without_such_weights_refuses_the_key_by_name(tiny: Path, name: str) -> None:
    with pytest.raises(InputError, match=rf"aggregation.single_weight.*{name} gives no single-modality silo"):
        resolved(tiny, f"protocol={name}", "aggregation.single_weight=0.5")


# ----------------------------------------------------------------------------------------------- the matched control
def rounds_of(run: SmallFederation, factor: float = 1.0) -> torch.Tensor:
    """The model after eight rounds."""
    for round_ in range(8):
        run.state = run.protocol.merge(run.state, weighted(run.replies(), factor), round_).state
        run.version += 1
    return run.state.theta


@pytest.mark.parametrize("base", ["info_nce", "dcmh"])
def test_the_matched_control_is_fedavg_with_single_weight_0_to_the_bit(base: str) -> None:
    objective = Objective() if base == "info_nce" else Objective(base=base, bits=8, hidden=16)
    control, void = (rounds_of(population(name, objective=objective), 0.0) for name in ("matched_control", "fedavg"))
    assert torch.equal(control, void)


def test_the_matched_control_is_fedavg_with_idle_single_modality_silos_to_the_bit() -> None:
    control, idle = population("matched_control"), population("fedavg", {"single_modality": "idle"})
    assert torch.equal(rounds_of(control), rounds_of(idle))


def test_the_matched_control_samples_all_silos_but_paired_only_does_not() -> None:
    control, alone = (population(name) for name in ("matched_control", "paired_only"))
    assert len(control.eligible) == 4
    assert len(alone.eligible) == 2
