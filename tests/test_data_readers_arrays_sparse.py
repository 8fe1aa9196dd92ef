"""Sparse arrays in MATLAB's version 5 and in HDF5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmq.config.scenario import Data
from fedmq.data.readers.arrays import read_arrays, read_pixels
from fedmq.errors import InputError
from tests.array_files import PIXELS, RNG, matlab_hdf5, refused, rows, saved

h5py = pytest.importorskip("h5py")
scipy_io = pytest.importorskip("scipy.io")
scipy_sparse = pytest.importorskip("scipy.sparse")


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


TAGS = np.kron(np.eye(3), [[0, 2, 0], [1, 0, 0], [0, 0, 0]])[:8]  # including rows and columns without a tag


@pytest.mark.parametrize("dtype", [np.float64, np.uint8])
@pytest.mark.parametrize("pixels", [False, True])
def test_sparse_arrays_in_matlabs_hdf5_are_read_like_those_of_version_5(
    dtype: Any, pixels: bool, tmp_path: Path
) -> None:
    image = RNG.integers(0, 256, (8, 5, 6, 3), dtype=np.uint8) if pixels else rows(8, 6)
    path = matlab_hdf5(tmp_path / "a.mat", IAll=image)
    sparse_hdf5(path, "YAll", TAGS.astype(dtype))
    sparse_hdf5(path, "LAll", np.eye(8, 4))
    older = tmp_path / "b.mat"
    scipy_io.savemat(older, {"IAll": image, "YAll": scipy_sparse.csc_matrix(TAGS), "LAll": np.eye(8, 4)})
    for file in (path, older):
        if pixels:
            found = read_pixels(Data(name="mirflickr", path=file))
            assert found.bag is not None
            assert np.array_equal(found.bag, TAGS)
            assert np.array_equal(found.labels, np.eye(8, 4))  # type: ignore[arg-type]
        else:
            arrays = read_arrays(Data(name="mirflickr", path=file))
            assert np.array_equal(arrays["text"], TAGS)
            assert np.array_equal(arrays["labels"], np.eye(8, 4))


def test_a_sparse_array_of_zeros_has_no_values_in_hdf5(tmp_path: Path) -> None:
    path = matlab_hdf5(tmp_path / "a.mat", IAll=rows(8, 6), TAll=rows(8, 5))
    found = read_arrays(Data(name="iapr", path=sparse_hdf5(path, "LAll", np.zeros((8, 4)))))
    assert found["labels"].tolist() == np.zeros((8, 4)).tolist()


HUGE = np.uint64(2**63)


@pytest.mark.parametrize(
    "changes",
    [
        {"ir": np.array([8] + [0] * 5, np.uint64)},
        {"ir": np.array([HUGE] + [0] * 5, np.uint64)},
        {"ir": np.array([-1] + [0] * 5)},
        {"ir": np.zeros(5, np.uint64)},
        {"ir": None},
        {"jc": np.array([0] * 9 + [7], np.uint64)},
        {"jc": np.array([0, 5, 4] + [6] * 7, np.uint64)},
        {"jc": np.array([0, HUGE] + [6] * 8, np.uint64)},
        {"jc": np.array([1] * 9 + [6], np.uint64)},
        {"jc": np.zeros(0, np.uint64)},
        {"jc": None},
        {"jc": np.zeros((2, 5), np.uint64)},
        {"rows": HUGE},
        {"rows": np.uint64(2**40)},
        {"rows": np.int64(-8)},
        {"rows": np.bytes_("eight")},
        {"data": np.zeros(6, [("real", "f8"), ("imag", "f8")])},
    ],
)
def test_a_sparse_array_with_indices_out_of_range_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    path = matlab_hdf5(tmp_path / "a.mat", IAll=rows(8, 6), LAll=np.eye(8, 4))
    sparse_hdf5(path, "YAll", TAGS, **changes)
    pixels = sparse_hdf5(matlab_hdf5(tmp_path / "b.mat", IAll=PIXELS, LAll=np.eye(6)), "YAll", TAGS, **changes)
    for read in (
        lambda: read_arrays(Data(name="pascal", path=path)),
        lambda: read_pixels(Data(name="ssense", path=pixels)),
    ):
        with pytest.raises(InputError, match=r"[ab]\.mat") as caught:
            read()
        assert "\n" not in str(caught.value)


def test_a_sparse_array_of_absurd_width_is_refused_before_it_is_made_dense(tmp_path: Path) -> None:
    path = matlab_hdf5(tmp_path / "a.mat", IAll=rows(8, 6), LAll=np.eye(8, 4))
    with h5py.File(path, "a") as file:
        group = file.create_group("YAll")
        group.attrs["MATLAB_sparse"] = np.uint64(8)
        group.create_dataset("jc", (2**40,), dtype=np.uint64, chunks=(1024,))  # takes no space on disk
    refused(path, "YAll: found 'Unable to allocate")


def test_a_version_5_sparse_array_with_indices_out_of_range_is_refused_before_it_is_made_dense(tmp_path: Path) -> None:
    matrix = scipy_sparse.csc_matrix(TAGS)
    path = saved(tmp_path / "a.mat", {"YAll": matrix, "IAll": rows(8, 6), "LAll": np.eye(8, 4)})
    content, known = path.read_bytes(), matrix.indices.astype("<i4").tobytes()
    assert content.count(known) == 1
    wrong = np.array([10**8, *matrix.indices[1:]]).astype("<i4").tobytes()
    path.write_bytes(content.replace(known, wrong))
    refused(path, "YAll: found 'indices must be < 8'")


def test_an_hdf5_group_as_a_split_is_refused(tmp_path: Path) -> None:
    path = matlab_hdf5(tmp_path / "a.mat", IAll=rows(8, 6), TAll=rows(8, 5), LAll=np.eye(8, 4))
    with h5py.File(path, "a") as file:
        file["split/train"] = np.arange(4)
        file["about/image"] = np.arange(4)  # other groups are ignored
    refused(path, r"a\.mat: split: found")
