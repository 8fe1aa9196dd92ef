"""Array files that are truncated, damaged, or whose parts do not fit each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmq.config.scenario import Data
from fedmq.data.prepare import prepare
from fedmq.data.readers import formats
from fedmq.data.readers.arrays import read_arrays
from fedmq.data.splits import SPLITS
from fedmq.errors import InputError
from fedmq.packages import MissingPackageError
from tests.array_files import FEATURES, matlab_hdf5, parts, refused, rows, saved

h5py = pytest.importorskip("h5py")
scipy_io = pytest.importorskip("scipy.io")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["4", "5", "compressed"])
def test_a_truncated_mat_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.mat"
    scipy_io.savemat(
        path, parts(), format=kind[0] if kind != "compressed" else "5", do_compression=kind == "compressed"
    )
    whole = path.read_bytes()
    data = Data(name="pascal", path=path)
    assert read_arrays(data)["labels"].shape == (12, 4)
    for size in range(len(whole) - 1, 140, -1):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError):
            prepare(data, FEATURES, tmp_path / "cache")


def test_an_empty_file_and_a_damaged_one_are_one_line_errors(tmp_path: Path) -> None:
    for name in ("empty.mat", "empty.h5", "empty.npz"):
        (tmp_path / name).write_bytes(b"")
        refused(tmp_path / name, name)
    path = tmp_path / "damaged.mat"
    scipy_io.savemat(path, parts(), do_compression=True)
    content = bytearray(path.read_bytes())
    content[140] ^= 0xFF
    path.write_bytes(content)
    refused(path, r"damaged\.mat")


def test_an_hdf5_file_with_damaged_data_is_a_one_line_error(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        for key, value in parts().items():
            file.create_dataset(key, data=value, compression="gzip", fletcher32=True)
        offset = file["I_tr"].id.get_chunk_info(0).byte_offset
    content = bytearray(path.read_bytes())
    content[offset + 9] ^= 0xFF
    path.write_bytes(content)
    refused(path, r"a\.h5")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"L_te": None}, "L_tr; no test labels.*of every part"),
        # Together they have as many rows as there are items.
        ({"L_tr": np.eye(4)[np.arange(7) % 4], "L_te": np.eye(5, 4)}, r"L_tr.*\[7, 4\].*\[8, L\]"),
        ({"L_te": np.eye(4, 3)}, r"L_te.*shape \[4, 3\].*\[4\] for each item, as L_tr"),
        ({"L_te": np.arange(4)[:, None]}, r"L_te.*shape \[4\].*as L_tr"),
        ({"L_tr": np.arange(8)[:, None]}, "L_te.*one class number for each item"),
        ({"I_te": rows(4, 6)}, r"I_te.*shape \[4, 6\].*rows of 5 numbers, as I_tr"),
        ({"T_te": rows(4, 2)}, r"T_te.*rows of 3 numbers, as T_tr"),
        ({"T_tr": rows(8, 3) * 1j}, "T_tr.*complex.*real numbers"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused_by_name(
    changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    refused(saved(tmp_path / "a.mat", parts(**changes)), expected)


def test_arrays_of_item_names_are_not_mistaken_for_data(tmp_path: Path) -> None:
    names = {"image_names": np.array(["a.jpg", "b.jpg"]), "label_names": np.array(["x", "y", "z", "w"])}
    for name in ("a.mat", "a.npz"):
        path = saved(tmp_path / name, {**names, **parts()})
        assert read_arrays(Data(name="pascal", path=path))["labels"].shape == (12, 4)


def test_a_training_item_repeated_in_the_database_is_read_as_one_item(tmp_path: Path) -> None:
    image, text, labels = rows(20, 5), rows(20, 3), np.eye(4)[np.arange(20) % 4]
    image[9], text[9], labels[9] = image[8], text[8], labels[8]  # two equal items, one of them trained on
    train = np.array([2, 3, 8, 15])
    arrays = parts(
        I_tr=image[train].astype(float), T_tr=text[train], L_tr=labels[train], I_db=image, T_db=text, L_db=labels
    )
    for name in ("a.mat", "a.npz"):
        found = prepare(Data(name="pascal", path=saved(tmp_path / name, arrays)), FEATURES, tmp_path / "cache")
        assert np.bincount(found.split, minlength=5).tolist() == [4, 0, 4, 0, 16]
        rest = np.delete(np.arange(20), train)
        assert np.array_equal(found.image[found.rows("database")], image[rest])
        assert found.labels is not None
        assert np.array_equal(found.labels[found.rows("database")], labels[rest])


def test_a_database_disjoint_from_the_training_items_is_kept_whole(tmp_path: Path) -> None:
    image, text, labels = rows(20, 5), rows(20, 3), np.eye(4)[np.arange(20) % 4]
    other = labels[:8, ::-1]  # the same pictures and texts with other labels are other items
    arrays = parts(I_tr=image[:8], T_tr=text[:8], L_tr=other, I_db=image, T_db=text, L_db=labels)
    found = read_arrays(Data(name="pascal", path=saved(tmp_path / "a.npz", arrays)))
    assert np.bincount(found["split"], minlength=5).tolist() == [8, 0, 4, 0, 20]
    arrays |= {"I_tr": rows(8, 5), "L_tr": labels[:8]}
    arrays["I_tr"][:3] = image[:3]  # only some are in it
    found = read_arrays(Data(name="pascal", path=saved(tmp_path / "a.npz", arrays)))
    assert np.bincount(found["split"], minlength=5).tolist() == [8, 0, 4, 0, 17]
    assert len(found["labels"]) == 29


@pytest.mark.parametrize("train", [True, False])
def test_a_query_repeated_in_the_database_is_left_out_of_the_gallery(train: bool, tmp_path: Path) -> None:
    image, text, labels = rows(20, 5), rows(20, 3), np.eye(4)[np.arange(20) % 4]
    image[9], text[9], labels[9] = image[8], text[8], labels[8]  # two equal items, one of them a query
    queries, rest = np.array([2, 8, 15]), np.delete(np.arange(20), [2, 8, 15])
    arrays = {"I_te": image[queries], "T_te": text[queries], "L_te": labels[queries]}
    arrays |= {"I_db": image, "T_db": text, "L_db": labels}
    arrays |= {"I_tr": rows(6, 5), "T_tr": rows(6, 3), "L_tr": np.eye(6, 4)} if train else {}
    found = read_arrays(Data(name="pascal", path=saved(tmp_path / "a.npz", arrays)))
    gallery = found["split"] == SPLITS.index("database" if train else "train")
    assert np.array_equal(found["image"][gallery], image[rest])
    assert np.array_equal(found["text"][found["split"] == SPLITS.index("test")], text[queries])
    assert len(found["image"]) == len(found["text"]) == len(found["labels"]) == len(found["split"]) == 20 + 6 * train


def test_a_database_of_queries_only_is_refused_for_lack_of_training_items(tmp_path: Path) -> None:
    arrays = {name.replace("tr", "db"): value for name, value in parts().items()}
    arrays |= {"I_db": arrays["I_te"], "T_db": arrays["T_te"], "L_db": arrays["L_te"]}
    refused(saved(tmp_path / "a.npz", arrays), "no train item")


def test_a_mat_file_truncated_between_two_arrays_is_refused_where_the_set_has_labels(tmp_path: Path) -> None:
    cut = saved(tmp_path / "b.mat", parts(L_tr=None, L_te=None))
    refused(cut, r"no labels.*labels, too, e\.g\. L_tr or LAll: pascal has some")
    assert "labels" not in read_arrays(Data(name="iapr", path=cut))


@pytest.mark.parametrize("name", ["a.mat", "a.h5", "a.npz"])
def test_a_broken_file_is_a_one_line_error(name: str, tmp_path: Path) -> None:
    head = b"\x89HDF\r\n\x1a\n" if name == "a.h5" else b""
    (tmp_path / name).write_bytes(head + b"nonsense" * 100)
    with pytest.raises(InputError, match=name) as caught:
        read_arrays(Data(name="pascal", path=tmp_path / name))
    assert "\n" not in str(caught.value)


def test_an_array_of_python_objects_is_never_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    np.savez(tmp_path / "a.npz", IAll=rows(2), TAll=np.array([[Trap()], [1]], dtype=object))
    with pytest.raises(InputError, match="plain arrays"):
        read_arrays(Data(name="pascal", path=tmp_path / "a.npz"))
    assert not (tmp_path / "ran").exists()


def test_without_the_readers_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = matlab_hdf5(tmp_path / "a.mat", IAll=rows(3), TAll=rows(3))
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(MissingPackageError, match=r"package h5py missing.*\[formats\]"):
        formats.list_arrays(str(path), "split")
