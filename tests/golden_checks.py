"""Golden values: their location and their comparison.

A golden test module ``test_golden_<name>.py`` has ``CHECKS``, a mapping from expected key to a function of the inputs
that calls the project, and one test, which compares every value of the file with :func:`compare_all`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = Path(os.environ.get("FEDMQ_GOLDEN") or Path(__file__).parent / "golden")

Inputs = Mapping[str, np.ndarray]
Check = Callable[[Inputs], Any]


@cache
def inputs(name: str) -> Inputs:
    with np.load(FOLDER / f"{name}_inputs.npz") as file:
        return {key: file[key] for key in file.files}


@cache
def expected(name: str) -> Inputs:
    with np.load(FOLDER / f"{name}_expected.npz") as file:
        return {key: file[key] for key in file.files}


def names() -> list[str]:
    return sorted(path.name.removesuffix("_expected.npz") for path in FOLDER.glob("*_expected.npz"))


def compare_all(
    name: str, checks: Mapping[str, Check], *, loose: Collection[str] = (), pending: Collection[str] = ()
) -> None:
    """Compare each value of a file, at 1e-6; a value without a check fails unless it is pending.

    Args:
        name: name of the file.
        checks: a check for each key.
        loose: keys whose golden values are finite differences with a step of 1e-6.
        pending: keys of values that nothing in the project computes.
    """
    assert checks.keys() | set(pending) == expected(name).keys() and not checks.keys() & set(pending)
    wrong = {}
    for key, check in checks.items():
        try:
            compare(name, key, check, atol=1e-8 if key in loose else 1e-12)
        except AssertionError as error:
            wrong[key] = str(error)
    assert not wrong, "\n".join(f"{key}: {why}" for key, why in wrong.items())


def compare(name: str, key: str, check: Check, rtol: float = 1e-6, atol: float = 1e-12) -> None:
    """Run one check and compare at 1e-6; shapes must agree too."""
    found = check(inputs(name))
    found = found.detach().numpy() if isinstance(found, torch.Tensor) else np.asarray(found)
    wanted = expected(name)[key]
    assert found.shape == wanted.shape, f"{key}: shape {found.shape}, expected {wanted.shape}"
    if found.dtype.kind == "f":
        assert found.dtype == np.float64, f"{key}: {found.dtype}, golden values are compared in float64"
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=atol, equal_nan=True, err_msg=key)


def t(array: np.ndarray) -> torch.Tensor:
    """A float64 tensor of a golden input."""
    return torch.from_numpy(np.ascontiguousarray(array)).double()
