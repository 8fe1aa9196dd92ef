"""Golden values: their location, their comparison, and which checks cover which file of values.

A golden test module ``test_golden_<name>.py`` has ``CHECKS``, a mapping from expected key to a function of the inputs
that calls the project, and one test parametrised over it with :func:`every`. test_golden_coverage.py reads the same
mappings, so a key counts as checked only where a test of its own compares it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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


def every(checks: Mapping[str, Check]) -> pytest.MarkDecorator:
    """One test per key, named after it."""
    return pytest.mark.parametrize("key", list(checks))


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
