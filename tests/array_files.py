"""Array files for tests: features in MATLAB's and NumPy's formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fedmq.config.scenario import Backbone

scipy_io = pytest.importorskip("scipy.io")
scipy_sparse = pytest.importorskip("scipy.sparse")
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


def feature_arrays(n: int = 10, captions: int = 3) -> dict[str, Any]:
    """Images, captions and the split of a file of features."""
    generator = np.random.default_rng(0)
    return {
        "image": generator.standard_normal((n, 6)).astype(np.float32),
        "text": generator.standard_normal((n, captions, 5)).astype(np.float16),
        "split": np.array(["train"] * (n - 3) + ["val", "test", "public"]),
    }


def sparse_hdf5(path: Path, key: str, dense: Any, **changes: Any) -> Path:
    """Add a sparse array to a file as MATLAB writes it with -v7.3; an all-zero array has no data and ir."""
    matrix = scipy_sparse.csc_matrix(dense)
    inside = {"data": matrix.data, "ir": matrix.indices.astype(np.uint64), "jc": matrix.indptr.astype(np.uint64)}
    inside = {"jc": inside["jc"]} if matrix.nnz == 0 else inside
    with h5py.File(path, "a") as file:
        group = file.create_group(key)
        group.attrs["MATLAB_class"] = np.bytes_("logical" if matrix.dtype == np.uint8 else "double")
        group.attrs["MATLAB_sparse"] = changes.pop("rows", np.uint64(matrix.shape[0]))
        for name, value in {**inside, **changes}.items():
            if value is not None:
                group[name] = value
    return path


PIXELS = RNG.integers(0, 256, (6, 8, 9, 3), dtype=np.uint8)  # items, height, width, channels


def _in_chunks(path: Path) -> None:
    with h5py.File(path, "w") as file:
        for key, value in parts().items():
            file.create_dataset(key, data=value, compression="gzip", fletcher32=True)


#: Names of files of arrays, what writes one, and the data set that it is.
ARRAY_FILES: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "a.npz": (lambda path: np.savez(path, **feature_arrays(), labels=np.arange(10) % 3), "features"),
    "a.safetensors": (
        lambda path: save_file(feature_arrays() | {"split": np.array([0] * 7 + [1, 2, 3])}, path),
        "features",
    ),
    "4.mat": (lambda path: scipy_io.savemat(path, parts(), format="4"), "pascal"),
    "5.mat": (lambda path: scipy_io.savemat(path, parts()), "pascal"),
    "compressed.mat": (lambda path: scipy_io.savemat(path, parts(), do_compression=True), "pascal"),
    "73.mat": (lambda path: matlab_hdf5(path, **parts()), "pascal"),
    "a.h5": (_in_chunks, "pascal"),
}
