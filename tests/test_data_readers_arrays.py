"""The .mat, .h5 and .npz files that circulate: which array is what, in features and in pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmq.config.scenario import Backbone, Data, Scenario
from fedmq.data.catalogue import SETS
from fedmq.data.prepare import prepare
from fedmq.data.readers.array_files import PARTS, meaning
from fedmq.data.readers.arrays import read_arrays, read_pixels
from fedmq.data.splits import SPLITS
from fedmq.errors import InputError
from fedmq.federation.population import build_population
from tests import layouts

scipy_io = pytest.importorskip("scipy.io")
scipy_sparse = pytest.importorskip("scipy.sparse")
h5py = pytest.importorskip("h5py")
FEATURES = Backbone(name="features")
RNG = np.random.default_rng(3)


def rows(n: int, d: int = 4) -> Any:
    return RNG.standard_normal((n, d)).astype(np.float32)


def matlab_hdf5(path: Path, **arrays: Any) -> Path:
    """What MATLAB writes with -v7.3: a header of 512 bytes, then HDF5 with all axes the other way round."""
    with h5py.File(path, "w", userblock_size=512) as file:
        for key, value in arrays.items():
            file[key] = np.asarray(value).transpose()
            file[key].attrs["MATLAB_class"] = np.bytes_("double")
    return path


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
def test_the_words_of_a_name_say_what_an_array_is(key: str, expected: object) -> None:
    assert meaning(key) == expected


def test_tr_beside_tra_is_what_is_retrieved_from(tmp_path: Path) -> None:
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


def test_the_document_has_every_word_of_a_part() -> None:
    text = (Path(__file__).parent.parent / "docs" / "reference" / "data_sets.md").read_text(encoding="utf-8")
    for part, words in PARTS.items():
        line = next(line for line in text.splitlines() if line.startswith(f"| `{part}` | `"))
        assert {word.strip("` ") for word in line.split("|")[2].split(";")[0].split(",")} == words


@pytest.mark.parametrize("word", ["dbase", "base", "ret", "retrieval"])
def test_a_database_has_many_names(word: str, tmp_path: Path) -> None:
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
def test_parts_are_never_lost_beside_arrays_of_no_part(more: dict[str, Any], ending: str, tmp_path: Path) -> None:
    # HDF5 lists names in the order of the alphabet.
    order = sorted if ending == "h5" else list
    found = f"'{', '.join(order(more))} of no part that is known beside {', '.join(order(parts()))}'"
    path = saved(tmp_path / f"a.{ending}", {**parts(), **more})
    refused(path, rf"{found}, allowed: a part in every name, or in none \(train: tr, tra, .*database: base, database")


def test_parts_of_pixels_are_never_lost_either(tmp_path: Path) -> None:
    arrays = {"I_te": PIXELS, "T_te": np.eye(6), "L_te": np.eye(6), "I_foo": PIXELS, "T_foo": np.eye(6)}
    with pytest.raises(InputError, match="I_foo, T_foo of no part that is known beside I_te, T_te, L_te"):
        read_pixels(Data(name="mirflickr", path=saved(tmp_path / "a.mat", arrays)))


@pytest.mark.parametrize("kind", ["mat", "v73", "h5", "npz"])
def test_train_and_test_parts_become_one_set_with_its_split(kind: str, tmp_path: Path) -> None:
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
    assert found.text.shape == (8, 1, 3)
    assert found.labels is not None
    # Classes counted from 1 become columns from 0.
    assert found.labels.argmax(axis=1).tolist() == [0, 1, 2, 0, 1, 2, 2, 0]
    assert found.split.tolist() == [0] * 6 + [2] * 2


def test_arrays_of_a_whole_set_get_the_split_its_papers_draw(tmp_path: Path) -> None:
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
    assert np.array_equal(found.text[:, 0], tags.toarray())
    other = prepare(data.model_copy(update={"split_seed": 1}), FEATURES, tmp_path / "cache")
    assert other.folder != found.folder


def test_a_split_in_the_file_is_kept(tmp_path: Path) -> None:
    split = np.array(["train"] * 5 + ["test"] * 3)
    np.savez(tmp_path / "a.npz", image=rows(8), text=rows(8), split=split)
    found = prepare(Data(name="iapr", path=tmp_path / "a.npz"), FEATURES, tmp_path / "cache")
    assert found.split.tolist() == [0] * 5 + [2] * 3


def matlab_characters(path: Path, split: Sequence[str]) -> None:
    """A char array in HDF5, as MATLAB stores one: numbers of characters, a string in each column."""
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
def test_a_files_own_split_is_read_however_it_is_stored(name: str, split: Any, pixels: bool, tmp_path: Path) -> None:
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
        ("a.mat", {"inside": CODES}, r"split: found .*\[1, 1\].*\[8\] of train"),
        ("a.h5", np.array(["train"] * 8, dtype=object), "no test item"),
    ],
)
def test_a_split_that_is_none_is_never_replaced_by_a_drawn_one(
    name: str, split: Any, expected: str, tmp_path: Path
) -> None:
    arrays = {"IAll": rows(8, 6), "TAll": rows(8, 5), "LAll": np.eye(8, 4), "split": split}
    refused(saved(tmp_path / name, arrays), expected)


def test_a_split_of_references_in_hdf5_is_refused(tmp_path: Path) -> None:
    path = matlab_hdf5(tmp_path / "a.mat", IAll=rows(8, 6), TAll=rows(8, 5), LAll=np.eye(8, 4))
    with h5py.File(path, "a") as file:
        file.create_dataset("split", (8, 1), dtype=h5py.ref_dtype)
    refused(path, r"split: found 'object \[8\]', allowed: \[8\] of train")


@pytest.mark.parametrize(
    "options", [{"text": "bag"}, {"missing": "skip"}, {"images": "x"}, {"annotations": "x"}, {"frames": 3}]
)
def test_keys_about_pictures_and_sentences_are_not_for_arrays(options: dict[str, Any], tmp_path: Path) -> None:
    (key,) = options
    path = saved(tmp_path / "a.npz", parts())
    with pytest.raises(InputError, match=rf"data\.{key}: found .*not for arrays of features"):
        prepare(Data(name="pascal", path=path, **options), FEATURES, tmp_path / "cache")
    if key not in ("text", "missing"):
        path = saved(tmp_path / "b.npz", {"IAll": PIXELS, "YAll": np.eye(6, 5), "LAll": np.eye(6)})
        with pytest.raises(InputError, match=rf"data\.{key}: found .*not for arrays of pixels"):
            SETS["nuswide"].read(Data(name="nuswide", path=path, **options))


# --- files that were cut, or whose parts do not fit -------------------------------------------------------------------


def parts(n: int = 8, **changes: Any) -> dict[str, Any]:
    """Training and test part with labels, of widths 5 and 3."""
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


@pytest.mark.parametrize("kind", ["4", "5", "compressed"])
def test_a_mat_file_that_was_cut_anywhere_is_refused(kind: str, tmp_path: Path) -> None:
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


def test_an_empty_file_and_a_damaged_one_are_one_line(tmp_path: Path) -> None:
    for name in ("empty.mat", "empty.h5", "empty.npz"):
        (tmp_path / name).write_bytes(b"")
        refused(tmp_path / name, name)
    path = tmp_path / "damaged.mat"
    scipy_io.savemat(path, parts(), do_compression=True)
    content = bytearray(path.read_bytes())
    content[140] ^= 0xFF
    path.write_bytes(content)
    refused(path, r"damaged\.mat")


def test_an_hdf5_file_whose_data_are_damaged_is_one_line(tmp_path: Path) -> None:
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
        # Together they are as many as the items are.
        ({"L_tr": np.eye(4)[np.arange(7) % 4], "L_te": np.eye(5, 4)}, r"L_tr.*shape \[7, 4\].*8 labels"),
        ({"L_te": np.eye(4, 3)}, r"L_te.*shape \[4, 3\].*\[4\] for each item, as L_tr"),
        ({"L_te": np.arange(4)[:, None]}, r"L_te.*shape \[4\].*as L_tr"),
        ({"L_tr": np.arange(8)[:, None]}, "L_te.*one class number for each item"),
        ({"I_te": rows(4, 6)}, r"I_te.*shape \[4, 6\].*rows of 5 numbers, as I_tr"),
        ({"T_te": rows(4, 2)}, r"T_te.*rows of 3 numbers, as T_tr"),
        ({"T_tr": rows(8, 3) * 1j}, "T_tr.*complex.*real numbers"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_named(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    refused(saved(tmp_path / "a.mat", parts(**changes)), expected)


def test_names_beside_the_arrays_are_not_taken_for_them(tmp_path: Path) -> None:
    names = {"image_names": np.array(["a.jpg", "b.jpg"]), "label_names": np.array(["x", "y", "z", "w"])}
    for name in ("a.mat", "a.npz"):
        path = saved(tmp_path / name, {**names, **parts()})
        assert read_arrays(Data(name="pascal", path=path))["labels"].shape == (12, 4)


def test_a_training_item_that_is_in_the_database_too_is_one_item(tmp_path: Path) -> None:
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


def test_a_database_apart_from_the_training_items_is_kept_whole(tmp_path: Path) -> None:
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
def test_a_query_that_is_in_the_database_too_is_not_in_the_gallery(train: bool, tmp_path: Path) -> None:
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


def test_a_database_of_queries_alone_leaves_nothing_to_train_on(tmp_path: Path) -> None:
    arrays = {name.replace("tr", "db"): value for name, value in parts().items()}
    arrays |= {"I_db": arrays["I_te"], "T_db": arrays["T_te"], "L_db": arrays["L_te"]}
    refused(saved(tmp_path / "a.npz", arrays), "no train item")


def test_hdf5_without_matlabs_mark_is_read_the_way_that_fits(tmp_path: Path) -> None:
    arrays = parts()
    plain = read_arrays(Data(name="pascal", path=saved(tmp_path / "plain.h5", arrays)))
    turned = read_arrays(
        Data(name="pascal", path=saved(tmp_path / "turned.h5", {name: value.T for name, value in arrays.items()}))
    )
    for name in ("image", "text", "labels", "split"):
        assert np.array_equal(plain[name], turned[name])
    assert np.array_equal(plain["image"][:8], arrays["I_tr"])


def test_hdf5_that_fits_both_ways_is_refused_unless_labels_or_a_split_decide(tmp_path: Path) -> None:
    both = {"IAll": rows(20, 6), "TAll": rows(20, 6)}
    refused(saved(tmp_path / "a.h5", both), "items may be rows or columns.*a `split`")
    split = np.array([0] * 15 + [2] * 5)
    assert len(read_arrays(Data(name="iapr", path=saved(tmp_path / "b.h5", {**both, "split": split})))["image"]) == 20
    turned = {name: value.T for name, value in both.items()}
    found = read_arrays(Data(name="pascal", path=saved(tmp_path / "c.h5", {**turned, "LAll": np.arange(20) % 3})))
    assert np.array_equal(found["image"], both["IAll"])
    # MATLAB's own mark leaves no doubt, and .npz is read as NumPy shows it.
    assert len(read_arrays(Data(name="iapr", path=matlab_hdf5(tmp_path / "d.mat", **both)))["image"]) == 20
    assert len(read_arrays(Data(name="iapr", path=saved(tmp_path / "e.npz", both)))["image"]) == 20


def test_columns_are_suggested_where_rows_do_not_fit_and_nothing_else_decides(tmp_path: Path) -> None:
    # One text too few looks like columns too.
    refused(saved(tmp_path / "a.h5", {"IAll": rows(9, 4), "TAll": rows(8, 4)}), "not equally many rows.*transpose")
    columns = {name: value.T for name, value in parts().items()}
    refused(saved(tmp_path / "a.mat", columns), "not equally many rows.*transpose")


def test_only_items_with_a_label_are_left_where_the_scenario_asks_for_it(tmp_path: Path) -> None:
    labels = np.eye(8, 4)
    path = saved(tmp_path / "a.npz", parts(L_tr=labels))
    found = read_arrays(Data(name="pascal", path=path, labelled=True))
    assert len(found["image"]) == len(found["split"]) == 8
    assert found["labels"].any(axis=1).all()
    path = saved(tmp_path / "a.npz", parts(L_tr=None, L_te=None))
    with pytest.raises(InputError, match=r"data\.labelled.*0 items with a label"):
        read_arrays(Data(name="iapr", path=path, labelled=True))


def test_a_mat_file_cut_off_between_two_arrays_is_refused_where_the_set_has_labels(tmp_path: Path) -> None:
    cut = saved(tmp_path / "b.mat", parts(L_tr=None, L_te=None))
    refused(cut, r"no labels.*labels, too, e\.g\. L_tr or LAll: pascal has some")
    assert "labels" not in read_arrays(Data(name="iapr", path=cut))


def test_wikipedias_raw_features_take_their_classes_from_the_lists_beside_them(tmp_path: Path) -> None:
    layouts.wikipedia(tmp_path)
    arrays = {"I_tr": rows(2), "T_tr": rows(2), "I_te": rows(3), "T_te": rows(3)}
    scipy_io.savemat(tmp_path / "raw_features.mat", arrays)
    found = read_arrays(Data(name="wikipedia", path=tmp_path / "raw_features.mat"))
    assert found["labels"].tolist() == [0, 1, 0, 8, 9]
    assert [SPLITS[code] for code in found["split"]] == ["train", "train", "val", "test", "test"]


def test_wikipedias_validation_items_are_not_retrieved_from(tmp_path: Path) -> None:
    layouts.wikipedia(tmp_path)
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


def test_two_label_levels_are_told_apart_by_name(tmp_path: Path) -> None:
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


# --- sparse arrays ----------------------------------------------------------------------------------------------------


def sparse_hdf5(path: Path, key: str, dense: Any, **changes: Any) -> Path:
    """A sparse array as MATLAB writes it with -v7.3, beside what the file has; without data and ir where all is 0."""
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


TAGS = np.kron(np.eye(3), [[0, 2, 0], [1, 0, 0], [0, 0, 0]])[:8]  # with rows and columns without a tag


@pytest.mark.parametrize("dtype", [np.float64, np.uint8])
@pytest.mark.parametrize("pixels", [False, True])
def test_sparse_arrays_of_matlabs_hdf5_are_read_as_those_of_version_5(dtype: Any, pixels: bool, tmp_path: Path) -> None:
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
    ("changes", "expected"),
    [
        ({"ir": np.array([8] + [0] * 5, np.uint64)}, "YAll: ir: found 'row 8', allowed: 0 to 7"),
        ({"ir": np.array([HUGE] + [0] * 5, np.uint64)}, f"YAll: ir: found 'row {HUGE}', allowed: 0 to 7"),
        ({"ir": np.array([-1] + [0] * 5)}, "YAll: ir: found 'row -1', allowed: 0 to 7"),
        ({"ir": np.zeros(5, np.uint64)}, "YAll: found '6 values of 5 rows'"),
        ({"ir": None}, "YAll: found '6 values of 0 rows'"),
        ({"ir": np.zeros(6)}, r"YAll: found 'a group of data, ir, jc \(wrong: ir\)', allowed: MATLAB's sparse array"),
        ({"jc": np.array([0] * 9 + [7], np.uint64)}, "YAll: jc: found .*ascending places, 0 to 6"),
        ({"jc": np.array([0, 5, 4] + [6] * 7, np.uint64)}, "YAll: jc: found .*ascending places, 0 to 6"),
        ({"jc": np.array([0, HUGE] + [6] * 8, np.uint64)}, "YAll: jc: found .*ascending places, 0 to 6"),
        ({"jc": np.array([1] * 9 + [6], np.uint64)}, "YAll: jc: found .*ascending places, 0 to 6"),
        ({"jc": np.zeros(0, np.uint64)}, "YAll: found 'a group of data, ir, jc .*jc or rows"),
        ({"jc": None}, "YAll: found 'a group of data, ir .*jc or rows"),
        ({"jc": np.zeros((2, 5), np.uint64)}, r"YAll: found 'a group of data, ir, jc \(wrong: jc\)"),
        ({"rows": HUGE}, f"a sparse array of {HUGE} x 9', allowed: at most 1073741824 values when written out"),
        ({"rows": np.int64(-8)}, "a sparse array of -8 x 9"),
        ({"rows": np.bytes_("eight")}, "YAll: found 'a group of data, ir, jc .*jc or rows"),
        ({"data": np.zeros(6, [("real", "f8"), ("imag", "f8")])}, "YAll: data: found .dtype .*allowed: real numbers"),
    ],
)
def test_a_sparse_array_whose_numbers_point_nowhere_is_refused(
    changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    path = matlab_hdf5(tmp_path / "a.mat", IAll=rows(8, 6), LAll=np.eye(8, 4))
    sparse_hdf5(path, "YAll", TAGS, **changes)
    pixels = sparse_hdf5(matlab_hdf5(tmp_path / "b.mat", IAll=PIXELS, LAll=np.eye(6)), "YAll", TAGS, **changes)
    for read in (
        lambda: read_arrays(Data(name="pascal", path=path)),
        lambda: read_pixels(Data(name="ssense", path=pixels)),
    ):
        with pytest.raises(InputError, match=expected) as caught:
            read()
        assert "\n" not in str(caught.value)


def test_columns_that_no_row_limits_are_not_written_out(tmp_path: Path) -> None:
    path = matlab_hdf5(tmp_path / "a.mat", IAll=rows(8, 6), LAll=np.eye(8, 4))
    with h5py.File(path, "a") as file:
        group = file.create_group("YAll")
        group.attrs["MATLAB_sparse"] = np.uint64(8)
        group.create_dataset("jc", (2**40,), dtype=np.uint64, chunks=(1024,))  # nothing of it lies on the disk
    refused(path, r"a sparse array of 8 x 1099511627775'")


def test_a_sparse_array_of_version_5_that_points_outside_is_refused_before_it_is_written_out(tmp_path: Path) -> None:
    matrix = scipy_sparse.csc_matrix(TAGS)
    path = saved(tmp_path / "a.mat", {"YAll": matrix, "IAll": rows(8, 6), "LAll": np.eye(8, 4)})
    content, known = path.read_bytes(), matrix.indices.astype("<i4").tobytes()
    assert content.count(known) == 1
    wrong = np.array([10**8, *matrix.indices[1:]]).astype("<i4").tobytes()
    path.write_bytes(content.replace(known, wrong))
    refused(path, "YAll: ir: found 'row 100000000', allowed: 0 to 7")


def test_a_structure_as_a_split_in_hdf5_is_refused(tmp_path: Path) -> None:
    path = matlab_hdf5(tmp_path / "a.mat", IAll=rows(8, 6), TAll=rows(8, 5), LAll=np.eye(8, 4))
    with h5py.File(path, "a") as file:
        file["split/train"] = np.arange(4)
        file["about/image"] = np.arange(4)  # another structure is passed over
    refused(path, r"a\.mat: split: found 'a group of train")


# --- pixels -----------------------------------------------------------------------------------------------------------

PIXELS = RNG.integers(0, 256, (6, 8, 9, 3), dtype=np.uint8)  # items, height, width, channels


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
        assert np.array_equal(found.pictures.frames(row)[0], PIXELS[row])
    assert np.array_equal(found.pictures.subset([4, 2]).frames(1)[0], PIXELS[2])
    assert found.bag is not None
    assert found.bag.dtype == np.uint8
    assert found.label_names[4] == "fine:00"
    assert SETS["ssense"].text == "bag"


@pytest.mark.parametrize("layout", ["mat", "v73", "h5", "npz"])
@pytest.mark.parametrize("dtype", ["f8", "f4", "i8", "u2"])
def test_pixels_of_any_type_are_read_as_long_as_they_are_whole(layout: str, dtype: str, tmp_path: Path) -> None:
    arrays = {"IAll": PIXELS.astype(dtype), "YAll": np.eye(6, 5), "LAll": np.eye(6, 4)}
    path = tmp_path / {"mat": "a.mat", "v73": "a.mat", "h5": "a.h5", "npz": "a.npz"}[layout]
    found = read_pixels(
        Data(name="mirflickr", path=matlab_hdf5(path, **arrays) if layout == "v73" else saved(path, arrays))
    )
    for row in range(6):
        assert found.pictures.frames(row)[0].dtype == np.uint8
        assert np.array_equal(found.pictures.frames(row)[0], PIXELS[row])


def test_pixels_that_are_none_are_refused_once(tmp_path: Path) -> None:
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


def test_a_picture_whose_values_are_no_pixels_is_unreadable_by_name(tmp_path: Path) -> None:
    for dtype, value in (("f8", 0.5), ("i2", 256), ("i2", -1)):
        image = PIXELS.astype(dtype)
        image[2, 1, 1, 1] = value
        path = saved(tmp_path / f"{dtype} {value}.h5", {"IAll": image, "YAll": np.eye(6, 5), "LAll": np.eye(6, 4)})
        found = read_pixels(Data(name="mirflickr", path=path))
        assert np.array_equal(found.pictures.frames(1)[0], PIXELS[1])
        with pytest.raises(InputError, match=rf"IAll\[2\]: found '{image.dtype} values from"):
            found.pictures.frames(2)


def test_pixels_that_are_split_already_say_what_to_do(tmp_path: Path) -> None:
    arrays = {
        f"{what}_{part}": value
        for part in ("tr", "te", "db")
        for what, value in zip("ITL", (PIXELS, np.eye(6), np.eye(6)), strict=True)
    }
    for path in (saved(tmp_path / "raw_nus.npz", arrays), matlab_hdf5(tmp_path / "raw_mir.mat", **arrays)):
        with pytest.raises(InputError, match=r"pixels that are split already, I_.*every item once: IAll.*a `split`"):
            read_pixels(Data(name="mirflickr", path=path))


def test_a_bag_with_a_value_that_is_no_number_is_named(tmp_path: Path) -> None:
    bag = np.eye(6, 5)
    bag[3, 1] = np.nan
    path = tmp_path / "a.mat"
    scipy_io.savemat(path, {"IAll": PIXELS, "YAll": bag, "LAll": np.eye(6)})
    with pytest.raises(InputError, match=r"YAll: found 'a value in row 3 that is not finite'"):
        read_pixels(Data(name="mirflickr", path=path))


def test_pixels_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("IAll", data=PIXELS, chunks=(1, 8, 9, 3), fletcher32=True)
        file["YAll"], file["LAll"] = np.eye(6, 5), np.eye(6, 4)
        offset = file["IAll"].id.get_chunk_info(2).byte_offset
    content = bytearray(path.read_bytes())
    content[offset] ^= 0xFF
    path.write_bytes(content)
    found = read_pixels(Data(name="mirflickr", path=path))
    assert np.array_equal(found.pictures.frames(1)[0], PIXELS[1])
    with pytest.raises(InputError, match=r"a\.h5"):
        found.pictures.frames(2)


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
def test_arrays_that_do_not_fit_are_named(arrays: dict[str, Any], expected: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(InputError, match=expected):
        prepare(Data(name="iapr", path=tmp_path / "a.npz", queries=1, val=0), FEATURES, tmp_path / "cache")


def test_labels_of_minus_one_and_one_are_those_of_nought_and_one(tmp_path: Path) -> None:
    labels = np.eye(4, 3)
    for number, given in enumerate((labels, 2 * labels - 1)):
        np.savez(tmp_path / f"{number}.npz", IAll=rows(4), TAll=rows(4), LAll=given)
        found = read_arrays(Data(name="iapr", path=tmp_path / f"{number}.npz"))
        assert np.array_equal(found["labels"], labels)


@pytest.mark.parametrize("name", ["a.mat", "a.h5", "a.npz"])
def test_a_broken_file_is_one_line(name: str, tmp_path: Path) -> None:
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
    matlab_hdf5(tmp_path / "a.mat", IAll=rows(3), TAll=rows(3))
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(InputError, match=r"package h5py missing.*\[formats\]"):
        read_arrays(Data(name="pascal", path=tmp_path / "a.mat"))


def test_fedcmrs_files_go_by_their_own_names_where_their_arrays_have_bare_ones(tmp_path: Path) -> None:
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


def test_arrays_of_all_of_wikipedia_are_drawn_as_its_papers_do(tmp_path: Path) -> None:
    values = {"IAll": rows(1000, 8), "TAll": rows(1000, 6), "LAll": np.eye(10)[np.arange(1000) % 10]}
    path = saved(tmp_path / "wikipedia.npz", values)
    found = prepare(Data(name="wikipedia", path=path), FEATURES, tmp_path / "cache")
    assert [len(found.rows(split)) for split in ("test", "val", "train")] == [462, 231, 307]
    pixels = {**values, "IAll": np.zeros((1000, 4, 4, 3), np.uint8)}
    assert len(SETS["wikipedia"].read(Data(name="wikipedia", path=saved(tmp_path / "pixels.npz", pixels)))) == 1000


def test_what_a_mac_leaves_beside_the_arrays_is_passed_over(tmp_path: Path) -> None:
    scipy_io.savemat(tmp_path / "iall.mat", {"IAll": PIXELS, "YAll": np.eye(6, 5), "LAll": np.eye(6, 24)})
    (tmp_path / "._iall.mat").write_bytes(b"\x00\x05\x16\x07Mac OS X")
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / ".cache").mkdir()
    for name in ("mirflickr", "nuswide"):
        assert len(SETS[name].read(Data(name=name, path=tmp_path))) == 6
