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
from tests.array_files import FEATURES, PIXELS, RNG, matlab_hdf5, parts, refused, rows, saved

h5py = pytest.importorskip("h5py")
scipy_io = pytest.importorskip("scipy.io")
scipy_sparse = pytest.importorskip("scipy.sparse")


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("I_tr", ("train", "image")),
        ("T_te", ("test", "text")),
        ("L_te", ("test", "labels")),
        ("IAll", ("all", "image")),
        ("YAll", ("all", "text")),
        ("LAll", ("all", "labels")),
        ("train_imgs_deep", ("train", "image")),
        ("train_imgs_labels", ("train", "labels")),
        ("test_texts_doc", ("test", "text")),
        ("valid_imgs_deep", ("val", "image")),
        ("img_train", ("train", "image")),
        ("tr_img_lab", ("train", "labels")),
        ("Image", ("all", "image")),
        ("Tag", ("all", "text")),
        ("I_db", ("database", "image")),
        ("I_dbase", ("database", "image")),
        ("T_dBase", ("database", "text")),
        ("L_base", ("database", "labels")),
        ("I_ret", ("database", "image")),
        ("retrieval_txts", ("database", "text")),
        ("I_tra", ("train", "image")),
        ("param", None),
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


@pytest.mark.parametrize("word", ["dbase", "base", "ret", "retrieval"])
def test_every_name_of_the_database_part_is_recognised(word: str, tmp_path: Path) -> None:
    database = {f"I_{word}": rows(9, 5), f"T_{word}": rows(9, 3), f"L_{word}": np.eye(9, 4)}
    found = read_arrays(Data(name="pascal", path=saved(tmp_path / "a.mat", {**parts(), **database})))
    assert np.bincount(found["split"], minlength=5).tolist() == [8, 0, 4, 0, 9]


@pytest.mark.parametrize(
    "more",
    [
        {"I_foo": rows(9, 5), "T_foo": rows(9, 3), "L_foo": np.eye(9, 4)},
        {"I_bar": rows(9, 5), "I_foo": rows(9, 5)},
        {"L_foo": np.eye(9, 4)},
        {"IAll": rows(12, 5), "TAll": rows(12, 3), "LAll": np.eye(12, 4)},
    ],
)
@pytest.mark.parametrize("ending", ["mat", "h5", "npz"])
def test_arrays_without_a_part_next_to_parts_are_refused(more: dict[str, Any], ending: str, tmp_path: Path) -> None:
    # HDF5 lists names alphabetically.
    order = sorted if ending == "h5" else list
    found = f"'{', '.join(order(more))} without a known part next to {', '.join(order(parts()))}'"
    path = saved(tmp_path / f"a.{ending}", {**parts(), **more})
    refused(path, rf"{found}, allowed: a part in every name, or in none \(train: tr, tra, .*database: base, database")


def test_pixel_arrays_without_a_part_next_to_parts_are_refused(tmp_path: Path) -> None:
    arrays = {"I_te": PIXELS, "T_te": np.eye(6), "L_te": np.eye(6), "I_foo": PIXELS, "T_foo": np.eye(6)}
    with pytest.raises(InputError, match="I_foo, T_foo without a known part next to I_te, T_te, L_te"):
        read_pixels(Data(name="mirflickr", path=saved(tmp_path / "a.mat", arrays)))


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


def test_a_split_stored_in_the_file_is_kept(tmp_path: Path) -> None:
    split = np.array(["train"] * 5 + ["test"] * 3)
    np.savez(tmp_path / "a.npz", image=rows(8), text=rows(8), split=split)
    found = prepare(Data(name="iapr", path=tmp_path / "a.npz"), FEATURES, tmp_path / "cache")
    assert found.split.tolist() == [0] * 5 + [2] * 3


def matlab_characters(path: Path, split: Sequence[str]) -> None:
    """A char array in HDF5 as MATLAB stores it: character codes, one string per column."""
    width = max(map(len, split))
    with h5py.File(path, "a") as file:
        file["split"] = np.array([[ord(letter) for letter in word.ljust(width)] for word in split], np.uint16).T
        file["split"].attrs["MATLAB_class"] = np.bytes_("char")


SPLIT = ["train"] * 4 + ["val"] * 2 + ["test"] * 2
CODES = np.array([0] * 4 + [1] * 2 + [2] * 2)
CELLS = np.empty((1, 8), dtype=object)
CELLS[:] = [SPLIT]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("strings.h5", SPLIT),
        ("bytes.h5", np.array(SPLIT, dtype="S")),
        ("row of strings.h5", np.array([SPLIT], dtype=object)),
        ("row.h5", CODES[None]),
        ("column.h5", CODES[:, None].astype(float)),
        ("row.mat", CODES[None]),
        ("column.mat", CODES[:, None]),
        ("doubles.mat", CODES.astype(float)),
        ("characters.mat", SPLIT),
        ("cells.mat", CELLS),
        ("v73.mat", CODES[None].astype(float)),
        ("v73 characters.mat", None),
        ("strings.npz", SPLIT),
        ("row.npz", CODES[None]),
    ],
)
@pytest.mark.parametrize("pixels", [False, True])
def test_a_split_stored_in_the_file_is_read_in_any_encoding(
    name: str, split: Any, pixels: bool, tmp_path: Path
) -> None:
    image = RNG.integers(0, 256, (8, 5, 6, 3), dtype=np.uint8) if pixels else rows(8, 6)
    arrays = {"IAll": image, "TAll": rows(8, 5), "LAll": np.eye(8, 4)}
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
    found = read_pixels(data).split if pixels else read_arrays(data)["split"]
    assert found is not None
    assert found.tolist() == CODES.tolist()


@pytest.mark.parametrize(
    ("name", "split", "expected"),
    [
        ("a.mat", np.array([0, 0, 0, 0, 1, 1, 2, 2.5]), r"float64 \[8\].*\[8\] of train, val, test"),
        ("a.mat", np.array(["train"] * 7 + ["tset"]), "'tset' in row 7"),
        ("a.mat", np.array([0] * 6 + [2]), r"\[1, 7\].*\[8\] of train"),
        ("a.mat", {"inside": CODES}, "split: found .*inside"),
        ("a.h5", np.array(["train"] * 8, dtype=object), "no test item"),
    ],
)
def test_an_invalid_split_is_refused_and_not_replaced_by_a_random_one(
    name: str, split: Any, expected: str, tmp_path: Path
) -> None:
    arrays = {"IAll": rows(8, 6), "TAll": rows(8, 5), "LAll": np.eye(8, 4), "split": split}
    refused(saved(tmp_path / name, arrays), expected)


def test_a_split_of_references_in_hdf5_is_refused(tmp_path: Path) -> None:
    path = matlab_hdf5(tmp_path / "a.mat", IAll=rows(8, 6), TAll=rows(8, 5), LAll=np.eye(8, 4))
    with h5py.File(path, "a") as file:
        file.create_dataset("split", (8, 1), dtype=h5py.ref_dtype)
    refused(path, "split: found 'an array of object'")


@pytest.mark.parametrize(
    "options", [{"text": "bag"}, {"missing": "skip"}, {"images": "x"}, {"annotations": "x"}, {"frames": 3}]
)
def test_options_for_images_and_sentences_are_refused_for_arrays(options: dict[str, Any], tmp_path: Path) -> None:
    (key,) = options
    path = saved(tmp_path / "a.npz", parts())
    with pytest.raises(InputError, match=rf"data\.{key}: found .*not for arrays of features"):
        prepare(Data(name="pascal", path=path, **options), FEATURES, tmp_path / "cache")
    if key not in ("text", "missing"):
        path = saved(tmp_path / "b.npz", {"IAll": PIXELS, "YAll": np.eye(6, 5), "LAll": np.eye(6)})
        with pytest.raises(InputError, match=rf"data\.{key}: found .*not for arrays of pixels"):
            SETS["nuswide"].read(Data(name="nuswide", path=path, **options))


def test_hdf5_without_a_matlab_header_is_read_in_the_orientation_that_fits(tmp_path: Path) -> None:
    arrays = parts()
    plain = read_arrays(Data(name="pascal", path=saved(tmp_path / "plain.h5", arrays)))
    turned = read_arrays(
        Data(name="pascal", path=saved(tmp_path / "turned.h5", {name: value.T for name, value in arrays.items()}))
    )
    for name in ("image", "text", "labels", "split"):
        assert np.array_equal(plain[name], turned[name])
    assert np.array_equal(plain["image"][:8], arrays["I_tr"])


def test_hdf5_that_fits_both_orientations_is_refused_unless_labels_or_a_split_decide(tmp_path: Path) -> None:
    both = {"IAll": rows(20, 6), "TAll": rows(20, 6)}
    refused(saved(tmp_path / "a.h5", both), "items may be rows or columns.*a `split`")
    split = np.array([0] * 15 + [2] * 5)
    assert len(read_arrays(Data(name="iapr", path=saved(tmp_path / "b.h5", {**both, "split": split})))["image"]) == 20
    turned = {name: value.T for name, value in both.items()}
    found = read_arrays(Data(name="pascal", path=saved(tmp_path / "c.h5", {**turned, "LAll": np.arange(20) % 3})))
    assert np.array_equal(found["image"], both["IAll"])
    # MATLAB's header settles the orientation, and .npz is read as NumPy shows it.
    assert len(read_arrays(Data(name="iapr", path=matlab_hdf5(tmp_path / "d.mat", **both)))["image"]) == 20
    assert len(read_arrays(Data(name="iapr", path=saved(tmp_path / "e.npz", both)))["image"]) == 20


def test_items_as_columns_are_suggested_where_rows_do_not_fit_and_nothing_else_decides(tmp_path: Path) -> None:
    # One text too few looks like columns too.
    refused(saved(tmp_path / "a.h5", {"IAll": rows(9, 4), "TAll": rows(8, 4)}), "not equally many rows.*transpose")
    columns = {name: value.T for name, value in parts().items()}
    refused(saved(tmp_path / "a.mat", columns), "not equally many rows.*transpose")


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


def test_labels_of_minus_one_and_one_are_read_as_zero_and_one(tmp_path: Path) -> None:
    labels = np.eye(4, 3)
    for number, given in enumerate((labels, 2 * labels - 1)):
        np.savez(tmp_path / f"{number}.npz", IAll=rows(4), TAll=rows(4), LAll=given)
        found = read_arrays(Data(name="iapr", path=tmp_path / f"{number}.npz"))
        assert np.array_equal(found["labels"], labels)


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
