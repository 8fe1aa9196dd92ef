"""Readers of published .mat, .h5 and .npz files: what each array name denotes, and how items are split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmq.config.scenario import Data, Scenario
from fedmq.data.catalogue import SETS
from fedmq.data.prepare import prepare
from fedmq.data.readers.array_files import PARTS, meaning
from fedmq.data.readers.arrays import read_arrays, read_pixels
from fedmq.data.splits import SPLITS
from fedmq.errors import InputError
from fedmq.federation.population import build_population
from tests import data_set_folders
from tests.array_files import FEATURES, PIXELS, RNG, matlab_hdf5, parts, rows, saved, sparse_hdf5

h5py = pytest.importorskip("h5py")
scipy_io = pytest.importorskip("scipy.io")
scipy_sparse = pytest.importorskip("scipy.sparse")


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("I_tr", ("train", "image")),
        ("LAll", ("all", "labels")),
        ("train_imgs_labels", ("train", "labels")),
        ("valid_imgs_deep", ("val", "image")),
        ("tr_img_lab", ("train", "labels")),
        ("Tag", ("all", "text")),
        ("T_dBase", ("database", "text")),
        ("retrieval_txts", ("database", "text")),
        ("I_tra", ("train", "image")),
        ("__header__", None),
    ],
)
def test_an_array_name_identifies_its_part_and_modality(key: str, expected: object) -> None:
    assert meaning(key) == expected


def test_tr_next_to_tra_denotes_the_retrieval_database(tmp_path: Path) -> None:
    assert meaning("L_tr", tra=True) == ("database", "labels")
    assert meaning("train_texts", tra=True) == ("train", "text")
    arrays = parts()
    rest = {f"{what}_tra": arrays.pop(f"{what}_tr") for what in "ITL"}
    rest |= {"I_tr": rows(12, 5), "T_tr": rows(12, 3), "L_tr": np.eye(12, 4)}
    for name, values in (
        ("with retrieval", {**arrays, **rest}),
        ("without", {**arrays, **dict(list(rest.items())[:3])}),
    ):
        found = read_arrays(Data(name="mirflickr", path=saved(tmp_path / f"{name}.mat", values)))
        more = 12 if "I_tr" in values else 0
        assert np.bincount(found["split"], minlength=5).tolist() == [8, 0, 4, 0, more]
        assert np.array_equal(found["image"][found["split"] == 0], rest["I_tra"])
        assert np.array_equal(found["image"][found["split"] == 2], arrays["I_te"])


def test_the_reference_page_lists_every_part_name() -> None:
    text = (Path(__file__).parent.parent / "docs" / "reference" / "data_sets.md").read_text(encoding="utf-8")
    for part, words in PARTS.items():
        line = next(line for line in text.splitlines() if line.startswith(f"| `{part}` | `"))
        assert {word.strip("` ") for word in line.split("|")[2].split(";")[0].split(",")} == words


@pytest.mark.parametrize("kind", ["mat", "v73", "h5", "npz"])
def test_train_and_test_parts_become_one_data_set_with_that_split(kind: str, tmp_path: Path) -> None:
    arrays = {
        "I_tr": rows(6), "T_tr": rows(6, 3), "L_tr": np.array([[1], [2], [3], [1], [2], [3]]),
        "I_te": rows(2), "T_te": rows(2, 3), "L_te": np.array([[3], [1]]),
    }  # fmt: skip
    path = tmp_path / {"mat": "a.mat", "v73": "a.mat", "h5": "a.h5", "npz": "a.npz"}[kind]
    if kind == "mat":
        scipy_io.savemat(path, {**arrays, "note": "hello"})
    elif kind == "v73":
        matlab_hdf5(path, **arrays)
    elif kind == "h5":
        with h5py.File(path, "w") as file:
            for key, value in arrays.items():
                file[key] = value
    else:
        np.savez(path, **arrays)
    found = prepare(Data(name="pascal", path=path), FEATURES, tmp_path / "cache")
    assert np.array_equal(found.image, np.concatenate([arrays["I_tr"], arrays["I_te"]]))
    assert found.text.shape == (8, 3)
    assert found.labels is not None
    # Classes counted from 1 become columns from 0.
    assert found.labels.argmax(axis=1).tolist() == [0, 1, 2, 0, 1, 2, 2, 0]
    assert found.split.tolist() == [0] * 6 + [2] * 2


def test_arrays_without_parts_are_split_randomly_as_in_the_data_sets_papers(tmp_path: Path) -> None:
    scipy_io.savemat(tmp_path / "mirflickr25k-fall.mat", {"FAll": rows(20)})
    tags = scipy_sparse.csc_matrix((rows(20, 5) > 0).astype(float))
    scipy_io.savemat(tmp_path / "mirflickr25k-yall.mat", {"YAll": tags})
    scipy_io.savemat(tmp_path / "mirflickr25k-lall.mat", {"LAll": np.eye(4)[np.arange(20) % 4]})
    with pytest.raises(InputError, match=r"data\.queries.*20 items"):
        prepare(Data(name="mirflickr", path=tmp_path), FEATURES, tmp_path / "cache")
    data = Data(name="mirflickr", path=tmp_path, queries=5, train=8)
    found = prepare(data, FEATURES, tmp_path / "cache")
    assert np.bincount(found.split, minlength=5).tolist() == [8, 0, 5, 0, 7]
    assert len(found.rows("database")) == 7
    assert found.text.dtype == np.float32
    assert np.array_equal(found.text, tags.toarray())
    other = prepare(data.model_copy(update={"split_seed": 1}), FEATURES, tmp_path / "cache")
    assert other.folder != found.folder


def matlab_characters(path: Path, split: Sequence[str]) -> None:
    """A char array in HDF5 as MATLAB stores it: character codes, one string per column."""
    width = max(map(len, split))
    with h5py.File(path, "a") as file:
        file["split"] = np.array([[ord(letter) for letter in word.ljust(width)] for word in split], np.uint16).T
        file["split"].attrs["MATLAB_class"] = np.bytes_("char")


SPLIT = ["train"] * 4 + ["val"] * 2 + ["test"] * 2
CODES = np.array([0] * 4 + [1] * 2 + [2] * 2)
IN_CELLS = np.empty((1, 8), dtype=object)
IN_CELLS[:] = [SPLIT]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("strings.h5", SPLIT),
        ("bytes.h5", np.array(SPLIT, dtype="S")),
        ("column.h5", CODES[:, None].astype(float)),
        ("doubles.mat", CODES.astype(float)),
        ("characters.mat", SPLIT),
        ("cells.mat", IN_CELLS),
        ("v73.mat", CODES[None].astype(float)),
        ("v73 characters.mat", None),
        ("strings.npz", SPLIT),
    ],
)
def test_a_split_stored_in_the_file_is_read_in_any_encoding(name: str, split: Any, tmp_path: Path) -> None:
    arrays = {"IAll": rows(8, 6), "TAll": rows(8, 5), "LAll": np.eye(8, 4)}
    if split is not None:
        arrays["split"] = split
    path = tmp_path / name
    if name.startswith("v73"):
        matlab_hdf5(path, **arrays)
        if split is None:
            matlab_characters(path, SPLIT)
    else:
        saved(path, arrays)
    data = Data(name="mirflickr", path=path)
    assert read_arrays(data)["split"].tolist() == CODES.tolist()


def test_hdf5_without_a_matlab_header_is_read_in_the_orientation_that_fits(tmp_path: Path) -> None:
    arrays = parts()
    plain = read_arrays(Data(name="pascal", path=saved(tmp_path / "plain.h5", arrays)))
    turned = read_arrays(
        Data(name="pascal", path=saved(tmp_path / "turned.h5", {name: value.T for name, value in arrays.items()}))
    )
    for name in ("image", "text", "labels", "split"):
        assert np.array_equal(plain[name], turned[name])
    assert np.array_equal(plain["image"][:8], arrays["I_tr"])


def test_hdf5_that_fits_both_orientations_is_read_if_labels_or_a_split_decide(tmp_path: Path) -> None:
    both = {"IAll": rows(20, 6), "TAll": rows(20, 6)}
    split = np.array([0] * 15 + [2] * 5)
    assert len(read_arrays(Data(name="iapr", path=saved(tmp_path / "b.h5", {**both, "split": split})))["image"]) == 20
    turned = {name: value.T for name, value in both.items()}
    found = read_arrays(Data(name="pascal", path=saved(tmp_path / "c.h5", {**turned, "LAll": np.arange(20) % 3})))
    assert np.array_equal(found["image"], both["IAll"])
    # MATLAB's header settles the orientation, and .npz is read as NumPy shows it.
    assert len(read_arrays(Data(name="iapr", path=matlab_hdf5(tmp_path / "d.mat", **both)))["image"]) == 20
    assert len(read_arrays(Data(name="iapr", path=saved(tmp_path / "e.npz", both)))["image"]) == 20


def test_items_without_a_label_are_dropped_if_the_scenario_says_so(tmp_path: Path) -> None:
    labels = np.eye(8, 4)
    path = saved(tmp_path / "a.npz", parts(L_tr=labels))
    found = read_arrays(Data(name="pascal", path=path, labelled=True))
    assert len(found["image"]) == len(found["split"]) == 8
    assert found["labels"].any(axis=1).all()
    path = saved(tmp_path / "a.npz", parts(L_tr=None, L_te=None))
    with pytest.raises(InputError, match=r"data\.labelled.*0 items with a label"):
        read_arrays(Data(name="iapr", path=path, labelled=True))


def test_wikipedias_raw_features_take_their_classes_from_the_lists_next_to_them(tmp_path: Path) -> None:
    data_set_folders.wikipedia(tmp_path)
    arrays = {"I_tr": rows(2), "T_tr": rows(2), "I_te": rows(3), "T_te": rows(3)}
    scipy_io.savemat(tmp_path / "raw_features.mat", arrays)
    found = read_arrays(Data(name="wikipedia", path=tmp_path / "raw_features.mat"))
    assert found["labels"].argmax(axis=1).tolist() == [0, 1, 0, 8, 9]
    assert (found["labels"].sum(axis=1) == 1).all()
    assert [SPLITS[code] for code in found["split"]] == ["train", "train", "val", "test", "test"]


def test_wikipedias_validation_items_are_not_in_the_database(tmp_path: Path) -> None:
    data_set_folders.wikipedia(tmp_path)
    arrays = {"I_tr": rows(2), "T_tr": rows(2), "I_te": rows(3), "T_te": rows(3)}
    scipy_io.savemat(tmp_path / "raw_features.mat", arrays)
    facts = {
        "name": "own",
        "protocol": "fedavg",
        "data": {"name": "wikipedia", "path": str(tmp_path / "raw_features.mat")},
        "backbone": {"name": "features"},
        "objective": {"base": "dcmh", "bits": 8},
        "silos": {"count": 1},
        "partition": {"kind": "iid"},
    }
    population = build_population(Scenario.model_validate(facts), cache=tmp_path / "cache")
    assert population.prepared.split.tolist() == [0, 0, 1, 2, 2]
    assert population.database.tolist() == [0, 1]


def test_two_label_levels_are_distinguished_by_name(tmp_path: Path) -> None:
    labels = np.zeros((10, 35))
    labels[:, 2] = labels[:, 20] = 1
    scipy_io.savemat(tmp_path / "vgg.mat", {"images": rows(10), "tags": rows(10), "labels": labels})
    found = prepare(Data(name="fashionvc", path=tmp_path / "vgg.mat", queries=2), FEATURES, tmp_path / "cache")
    assert found.label_names[:2] == ("coarse:00", "coarse:01")
    assert found.label_names[8] == "fine:00"
    assert len(found.label_names) == 35
    scipy_io.savemat(tmp_path / "vgg.mat", {"images": rows(10), "tags": rows(10), "labels": labels[:, 1:]})
    with pytest.raises(InputError, match="8 coarse and 27 fine"):
        read_arrays(Data(name="fashionvc", path=tmp_path / "vgg.mat"))


def test_fedcmrs_files_are_identified_by_file_name_where_array_names_are_generic(tmp_path: Path) -> None:
    for folder in ("whole", "parts/train", "parts/test"):
        (tmp_path / folder).mkdir(parents=True)
    for name, columns in (("imgs", 8), ("texts", 6)):
        saved(tmp_path / "whole" / f"{name}_shuffled.mat", {"features": rows(20, columns)})
    saved(tmp_path / "whole" / "labels_shuffled.mat", {"labels": np.arange(20)[:, None] % 4 + 1})
    found = read_arrays(Data(name="pascal", path=tmp_path / "whole"))
    assert {name: each.shape for name, each in found.items()} == {"image": (20, 8), "text": (20, 6), "labels": (20,)}
    for part, n in (("train", 20), ("test", 6)):
        for name, columns in (("imgs", 8), ("texts", 6)):
            saved(tmp_path / "parts" / part / f"{part}_{name}.mat", {"features": rows(n, columns)})
        saved(tmp_path / "parts" / part / f"{part}_labels.mat", {"labels": np.arange(n)[:, None] % 4 + 1})
    parts = read_arrays(Data(name="wikipedia", path=tmp_path / "parts"))
    assert parts["image"].shape == (26, 8)
    assert (parts["split"] == SPLITS.index("train")).sum() == 20


def test_arrays_of_the_whole_wikipedia_set_are_split_as_in_its_papers(tmp_path: Path) -> None:
    values = {"IAll": rows(1000, 8), "TAll": rows(1000, 6), "LAll": np.eye(10)[np.arange(1000) % 10]}
    path = saved(tmp_path / "wikipedia.npz", values)
    found = prepare(Data(name="wikipedia", path=path), FEATURES, tmp_path / "cache")
    assert [len(found.rows(split)) for split in ("test", "val", "train")] == [462, 231, 307]
    pixels = {**values, "IAll": np.zeros((1000, 4, 4, 3), np.uint8)}
    assert len(SETS["wikipedia"].read(Data(name="wikipedia", path=saved(tmp_path / "pixels.npz", pixels)))) == 1000


def test_macos_metadata_files_next_to_the_arrays_are_ignored(tmp_path: Path) -> None:
    scipy_io.savemat(tmp_path / "iall.mat", {"IAll": PIXELS, "YAll": np.eye(6, 5), "LAll": np.eye(6, 24)})
    (tmp_path / "._iall.mat").write_bytes(b"\x00\x05\x16\x07Mac OS X")
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / ".cache").mkdir()
    for name in ("mirflickr", "nuswide"):
        assert len(SETS[name].read(Data(name=name, path=tmp_path))) == 6


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


# --- pixels and sparse arrays ---------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("layout", "dtype"), [("mat", "f8"), ("v73", "f4"), ("h5", "i8"), ("npz", "u2")])
def test_pixels_of_any_dtype_are_read_if_they_are_whole_numbers(layout: str, dtype: str, tmp_path: Path) -> None:
    arrays = {"IAll": PIXELS.astype(dtype), "YAll": np.eye(6, 5), "LAll": np.eye(6, 4)}
    path = tmp_path / {"mat": "a.mat", "v73": "a.mat", "h5": "a.h5", "npz": "a.npz"}[layout]
    found = read_pixels(
        Data(name="mirflickr", path=matlab_hdf5(path, **arrays) if layout == "v73" else saved(path, arrays))
    )
    for row in range(6):
        assert found.images.frames(row)[0].dtype == np.uint8
        assert np.array_equal(found.images.frames(row)[0], PIXELS[row])


TAGS = np.kron(np.eye(3), [[0, 2, 0], [1, 0, 0], [0, 0, 0]])[:8]  # including rows and columns without a tag


@pytest.mark.parametrize(("dtype", "pixels"), [(np.float64, False), (np.uint8, True)])
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
