"""Random scripts of a whole federation, each replayed by ``python -m tests.simulation SEED``."""

from __future__ import annotations

import os

import pytest

from tests.simulation import Script, simulate

#: Number of scripts; ``make simulate SEEDS=...`` runs more.
SEEDS = int(os.environ.get("FEDMQ_SEEDS", "100"))
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


def test_a_seed_gives_the_same_run_again() -> None:
    seed = next(seed for seed in range(1, 100) if Script.of(seed).weather.lost and Script.of(seed).disk)
    first, second = simulate(seed), simulate(seed)
    assert (first.world.now, first.world.writes, first.honest) == (second.world.now, second.world.writes, second.honest)
