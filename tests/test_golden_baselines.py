"""FedAvg and the merge rules all methods share against their golden values."""

from __future__ import annotations

import torch

from protocols import _merge
from tests.golden_checks import Check, Inputs, compare, every, t

STALENESS = torch.tensor([0.0, 3.0, 8.0], dtype=torch.float64)


def sample_weights(x: Inputs) -> torch.Tensor:
    return _merge.sample_weights([int(n) for n in x["n_k"]])


CHECKS: dict[str, Check] = {
    "fedavg": lambda x: _merge.weighted_sum(list(t(x["W"])), sample_weights(x)),
    "damped_a0.5_s0_3_8": lambda x: _merge.damped(sample_weights(x), _merge.damping(STALENESS, 0.5)),
    "damped_a0": lambda x: _merge.damped(sample_weights(x), _merge.damping(STALENESS, 0.0)),
    "branch_average_101": lambda x: _merge.branch_average(
        list(t(x["W"])), sample_weights(x), torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    ),
}


@every(CHECKS)
def test_golden_baselines(key: str) -> None:
    compare("baselines", key, CHECKS[key])
