"""Random scripts of a whole federation, each replayed by ``python -m tests.simulation SEED``."""

from __future__ import annotations

import os
import random

import pytest

from tests.planted_faults import FAULTS, finds
from tests.simulated_network import World
from tests.simulation import Script, simulate

#: Number of scripts; ``make simulate SEEDS=...`` runs more.
SEEDS = int(os.environ.get("FEDMQ_SEEDS", "300"))
#: Scripts of one test; the undisturbed models are computed once in each process.
_TOGETHER = 10


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, SEEDS + 1, _TOGETHER))
def test_invariants_hold_under_random_faults(first: int) -> None:
    failed = dict[int, str]()
    for seed in range(first, min(first + _TOGETHER, SEEDS + 1)):
        try:
            simulate(seed)
        except Exception as error:
            failed[seed] = f"{type(error).__name__}: {error}"
    assert not failed, f"replay with `python -m tests.simulation {' '.join(map(str, failed))}`"


@pytest.mark.slow
def test_a_seed_gives_the_same_run_again() -> None:
    seed = next(seed for seed in range(1, 100) if Script.of(seed).weather.lost and Script.of(seed).disk)
    first, second = simulate(seed), simulate(seed)
    assert [each.invariants.honest for each in (first, second)] and (first.world.now, first.world.writes) == (
        second.world.now,
        second.world.writes,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str) -> None:
    assert finds(FAULTS[name], FAULTS[name].seed)


def test_a_run_without_a_merge_fails() -> None:
    world = World(random.Random(1), stuck=lambda: "the coordinator waits for silo-00")
    world.pass_until(10_000)
    with pytest.raises(AssertionError, match=r"no merge for 10000 s; the coordinator waits for silo-00"):
        world.pass_until(10_000)
