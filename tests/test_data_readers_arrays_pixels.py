"""Arrays of pixels in any axis order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmq.config.scenario import Data
from fedmq.data.catalogue import SETS
from fedmq.data.prepare import prepare
from fedmq.data.readers.arrays import read_pixels
from fedmq.errors import InputError
from tests.array_files import FEATURES, PIXELS, matlab_hdf5, rows, saved

h5py = pytest.importorskip("h5py")
scipy_io = pytest.importorskip("scipy.io")


@pytest.mark.parametrize("layout", ["mat", "v73 items last", "v73 items first", "h5 channels first"])
def test_pixels_come_out_upright_however_they_were_stored(layout: str, tmp_path: Path) -> None:
    if layout == "mat":
        scipy_io.savemat(tmp_path / "image.mat", {"Image": PIXELS})
    elif layout == "v73 items last":
        matlab_hdf5(tmp_path / "iall.mat", IAll=PIXELS.transpose(1, 2, 3, 0))
    elif layout == "v73 items first":
        matlab_hdf5(tmp_path / "image.mat", Image=PIXELS)
    else:
        with h5py.File(tmp_path / "image.h5", "w") as file:
            file["images"] = PIXELS.transpose(0, 3, 1, 2)
    scipy_io.savemat(tmp_path / "tag.mat", {"Tag": np.eye(6, 5)})
    scipy_io.savemat(tmp_path / "label.mat", {"Label": np.eye(6, 32)})
    found = read_pixels(Data(name="ssense", path=tmp_path))
    for row in range(6):
        assert np.array_equal(found.images.frames(row)[0], PIXELS[row])
    assert np.array_equal(found.images.subset([4, 2]).frames(1)[0], PIXELS[2])
    assert found.bag is not None
    assert found.bag.dtype == np.uint8
    assert found.label_names[4] == "fine:00"
    assert SETS["ssense"].text == "bag"


@pytest.mark.parametrize("layout", ["mat", "v73", "h5", "npz"])
@pytest.mark.parametrize("dtype", ["f8", "f4", "i8", "u2"])
def test_pixels_of_any_dtype_are_read_if_they_are_whole_numbers(layout: str, dtype: str, tmp_path: Path) -> None:
    arrays = {"IAll": PIXELS.astype(dtype), "YAll": np.eye(6, 5), "LAll": np.eye(6, 4)}
    path = tmp_path / {"mat": "a.mat", "v73": "a.mat", "h5": "a.h5", "npz": "a.npz"}[layout]
    found = read_pixels(
        Data(name="mirflickr", path=matlab_hdf5(path, **arrays) if layout == "v73" else saved(path, arrays))
    )
    for row in range(6):
        assert found.images.frames(row)[0].dtype == np.uint8
        assert np.array_equal(found.images.frames(row)[0], PIXELS[row])


def test_invalid_pixel_values_and_shapes_are_refused(tmp_path: Path) -> None:
    nan = PIXELS.astype("f4")
    nan[3, 0, 0, 0] = np.nan
    for number, (value, expected) in enumerate(
        [
            (PIXELS / 255, r"IAll\[0\]: found 'float64 values from .*whole numbers 0 to 255 in three channels"),
            (PIXELS - 117.5, r"IAll\[0\]: found 'float64 values from -.*\.5 to"),
            (PIXELS * 257.0, r"IAll\[0\]: found 'float64 values from"),
            (nan, r"IAll\[3\]: found 'float32 values from nan to nan"),
            (PIXELS > 99, r"IAll\[0\]: found 'bool \[8, 9, 3\]'"),
            (PIXELS[..., :2], r"IAll: found 'shape \[6, 8, 9, 2\]'"),
            (PIXELS[:, :0], r"IAll: found 'shape \[6, 0, 9, 3\]'"),
        ]
    ):
        arrays = {"IAll": value, "YAll": np.eye(6, 5), "LAll": np.eye(6, 4)}
        for ending in ("npz", "h5"):
            if ending == "npz" or value.dtype != np.bool_:
                with pytest.raises(InputError, match=expected):
                    read_pixels(Data(name="mirflickr", path=saved(tmp_path / f"{number}.{ending}", arrays)))


def test_an_image_with_invalid_pixel_values_is_listed_as_unreadable(tmp_path: Path) -> None:
    for dtype, value in (("f8", 0.5), ("i2", 256), ("i2", -1)):
        image = PIXELS.astype(dtype)
        image[2, 1, 1, 1] = value
        path = saved(tmp_path / f"{dtype} {value}.h5", {"IAll": image, "YAll": np.eye(6, 5), "LAll": np.eye(6, 4)})
        found = read_pixels(Data(name="mirflickr", path=path))
        assert np.array_equal(found.images.frames(1)[0], PIXELS[1])
        with pytest.raises(InputError, match=rf"IAll\[2\]: found '{image.dtype} values from"):
            found.images.frames(2)


def test_pixel_arrays_that_are_split_already_are_refused_with_a_remedy(tmp_path: Path) -> None:
    arrays = {
        f"{what}_{part}": value
        for part in ("tr", "te", "db")
        for what, value in zip("ITL", (PIXELS, np.eye(6), np.eye(6)), strict=True)
    }
    for path in (saved(tmp_path / "raw_nus.npz", arrays), matlab_hdf5(tmp_path / "raw_mir.mat", **arrays)):
        with pytest.raises(InputError, match=r"pixels that are split already, I_.*every item once: IAll.*a `split`"):
            read_pixels(Data(name="mirflickr", path=path))


def test_a_bag_of_words_with_a_non_finite_value_is_refused_by_name(tmp_path: Path) -> None:
    bag = np.eye(6, 5)
    bag[3, 1] = np.nan
    path = tmp_path / "a.mat"
    scipy_io.savemat(path, {"IAll": PIXELS, "YAll": bag, "LAll": np.eye(6)})
    with pytest.raises(InputError, match=r"YAll: found 'a value in row 3 that is not finite'"):
        read_pixels(Data(name="mirflickr", path=path))


def test_unreadable_pixels_are_a_one_line_error(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("IAll", data=PIXELS, chunks=(1, 8, 9, 3), fletcher32=True)
        file["YAll"], file["LAll"] = np.eye(6, 5), np.eye(6, 4)
        offset = file["IAll"].id.get_chunk_info(2).byte_offset
    content = bytearray(path.read_bytes())
    content[offset] ^= 0xFF
    path.write_bytes(content)
    found = read_pixels(Data(name="mirflickr", path=path))
    assert np.array_equal(found.images.frames(1)[0], PIXELS[1])
    with pytest.raises(InputError, match=r"a\.h5"):
        found.images.frames(2)


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"I_tr": rows(4), "L_tr": np.ones(4)}, "no train text"),
        ({"foo": rows(4)}, "no array that is known"),
        ({"IAll": rows(4), "image": rows(4), "TAll": rows(4)}, "both all image"),
        ({"IAll": rows(4), "TAll": rows(5)}, r"IAll \[4, 4\], TAll \[5, 4\]: not equally many rows.*transpose"),
        ({"IAll": rows(4), "TAll": rows(5, 3)}, r"TAll.*4 rows"),
        ({"IAll": rows(4), "TAll": rows(4), "LAll": np.array([0.5, 1, 2, 3])}, "not whole"),
        ({"IAll": np.full((4, 2), np.nan), "TAll": rows(4)}, "not finite"),
        (
            {"IAll": rows(4), "TAll": rows(4), "LAll": np.eye(4) * 5},
            "LAll: found 5, allowed: multi-hot labels of 0 and 1",
        ),
        ({"IAll": rows(4), "TAll": rows(4), "LAll": np.eye(4) - 1 + np.eye(4, k=1) * 3}, "found .*labels of -1 and 1"),
        ({"IAll": rows(4), "TAll": rows(4), "LAll": np.array([1, 2, -1, 2])}, "LAll: found -1, allowed: class numbers"),
        ({"IAll": rows(0), "TAll": rows(0), "LAll": np.eye(0, 3)}, "found 'no rows', allowed: at least one item"),
    ],
)
def test_pixel_arrays_of_mismatched_size_are_refused_by_name(
    arrays: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(InputError, match=expected):
        prepare(Data(name="iapr", path=tmp_path / "a.npz", queries=1, val=0), FEATURES, tmp_path / "cache")
