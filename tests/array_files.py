"""Array files for tests: features in MATLAB's and NumPy's formats, and a check for refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmq.config.scenario import Backbone, Data
from fedmq.data.prepare import prepare
from fedmq.errors import InputError

scipy_io = pytest.importorskip("scipy.io")
h5py = pytest.importorskip("h5py")
FEATURES = Backbone(name="features")
RNG = np.random.default_rng(3)


def rows(n: int, d: int = 4) -> Any:
    return RNG.standard_normal((n, d)).astype(np.float32)


def matlab_hdf5(path: Path, **arrays: Any) -> Path:
    """Write a file like MATLAB with -v7.3: a header of 512 bytes, then HDF5 with all axes reversed."""
    with h5py.File(path, "w", userblock_size=512) as file:
        for key, value in arrays.items():
            file[key] = np.asarray(value).transpose()
            file[key].attrs["MATLAB_class"] = np.bytes_("double")
    return path


def parts(n: int = 8, **changes: Any) -> dict[str, Any]:
    """Training and test parts with labels; images of width 5, texts of width 3."""
    arrays = {
        "I_tr": rows(n, 5), "T_tr": rows(n, 3), "L_tr": np.eye(4)[np.arange(n) % 4],
        "I_te": rows(4, 5), "T_te": rows(4, 3), "L_te": np.eye(4),
    }  # fmt: skip
    return {name: value for name, value in {**arrays, **changes}.items() if value is not None}


def saved(path: Path, arrays: dict[str, Any]) -> Path:
    if path.suffix == ".mat":
        scipy_io.savemat(path, arrays)
    elif path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            for key, value in arrays.items():
                file[key] = value
    else:
        np.savez(path, **arrays)
    return path


def refused(path: Path, expected: str, name: str = "pascal") -> None:
    with pytest.raises(InputError, match=expected) as caught:
        prepare(Data(name=name, path=path), FEATURES, path.parent / "cache")
    assert "\n" not in str(caught.value)


PIXELS = RNG.integers(0, 256, (6, 8, 9, 3), dtype=np.uint8)  # items, height, width, channels
