"""The weight of single-modality silos' replies (``aggregation.single_weight``), for every method that has one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import protocols
from coordinator.updates import merged_state
from coordinator.updates import weighted as weighted_reply
from fedmq.config.scenario import Objective
from fedmq.config.sections import Robust
from fedmq.errors import InputError
from fedmq.federation.protocol import Update, take
from fedmq.wire.payloads import Delta
from protocols.parts import aggregation
from protocols.parts.robust import robust_replies
from tests.small_federation import SmallFederation, population
from tests.test_federation_staleness import replies, setting
from tests.threaded_run import resolved

METHODS = {name: protocols.load(name) for name in protocols.names()}
NAMES = [name for name, kind in METHODS.items() if kind.traits_of(kind.Options()).weighs_single_silos]
#: They train the model at the coordinator, on public items, so that no reply has to count for it to change.
AT_THE_COORDINATOR = {"carmfl", "creamfl_public"}


def weighted(given: Sequence[Update], factor: float) -> list[Update]:
    return [replace(each, modality_weight=1.0 if each.silo.paired else factor) for each in given]


def test_every_method_that_averages_updates_by_their_factor_has_the_weight() -> None:
    without = METHODS.keys() - set(NAMES)
    assert without == {"local", "central", "fedproto", "plfedcmh", "scaffold", "paired_only", "matched_control"}


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


@pytest.mark.parametrize(("name", "mixed"), [("fedavg", 1.0), ("fedbridge", 1 - 0.8 * 4 / 11)])
def test_the_coordinator_weights_items_that_lack_a_modality_where_the_method_trains_on_them(
    name: str, mixed: float, tiny: Path
) -> None:
    run = population(name)
    kept = setting(tiny, run, name, "aggregation.single_weight=0.2")
    given = replies(run, kept, (2, 2, 2, 2), Counter())
    assert [reply.factor for reply in given] == [1.0, 0.2, 0.2, 1.0]
    unpaired = replace(given[0], silo=replace(given[0].silo, image_only=1, text_only=3))
    assert weighted_reply(kept, unpaired, {2: run.state}, 2, Counter()).factor == pytest.approx(mixed)


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


# ------------------------------------------------------------------------------------- merges without conflicts
def expected_step(deltas: np.ndarray, weights: np.ndarray, paired: np.ndarray) -> np.ndarray:
    """The step of a branch [n] with ``branch_renorm: conflict_free``, from updates [M, n]."""
    active = deltas.any(axis=1)
    paired, single = active & paired, active & ~paired
    p, s = (np.average(deltas[side], axis=0, weights=weights[side]) for side in (paired, single))
    share = weights[single].sum() / weights[active].sum()
    s = s - min(0.0, float(s @ p)) * p / float(p @ p)
    step: np.ndarray = p + share * min(1.0, float(np.linalg.norm(p) / np.linalg.norm(s))) * s
    return step


@pytest.mark.parametrize("against", [-1.0, 0.2])
def test_the_single_modality_silos_step_never_points_against_that_of_the_paired_ones(against: float) -> None:
    run = population("fedavg", {"branch_renorm": "conflict_free"})
    run.round()
    given = weighted(run.replies(), 0.7)
    p = given[0].delta.numpy() + given[3].delta.numpy()
    for place, (name, far) in enumerate((("image", 3.0), ("text", 0.1)), start=1):  # longer and shorter than P
        part = run.protocol.branches[name]  # type: ignore[attr-defined]
        changed = np.zeros_like(p)
        changed[part] = far * (against * p[part] + np.roll(p[part], 1))
        delta = replace(take(given[place].payloads, Delta), buffer=changed)
        given[place] = replace(given[place], payloads=(delta, *given[place].payloads[1:]))
    merged = run.protocol.merge(run.state, given, 1).state.theta - run.state.theta
    samples = np.array([reply.samples * reply.factor for reply in given])
    deltas = np.stack([reply.delta.numpy() for reply in given]).astype(np.float64)
    for part in run.protocol.branches.values():  # type: ignore[attr-defined]
        step = expected_step(deltas[:, part], samples, np.array([True, False, False, True]))
        np.testing.assert_allclose(merged[part].numpy(), step, atol=2e-7)
        alone = np.average(deltas[[0, 3]][:, part], axis=0, weights=samples[[0, 3]])
        assert step @ alone >= alone @ alone * (1 - 1e-9)


@pytest.mark.parametrize("paired", [True, False])
def test_a_merge_without_conflicts_of_one_kind_of_silos_is_their_mean(paired: bool) -> None:
    parts, weights = [torch.tensor([1.0, -2.0]), torch.tensor([5.0, 2.0])], torch.tensor([0.25, 0.75]).double()
    assert aggregation.conflict_free(parts, weights, torch.tensor([paired] * 2)).tolist() == [4.0, 1.0]
    assert aggregation.conflict_free(parts, 0 * weights, torch.tensor([paired] * 2)).tolist() == [0.0, 0.0]
