"""Photos as people keep them: with .txt files, as imagefolders, in Parquet and Arrow files, in tars of webdataset."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmq.data.raw_set import RawSet
from fedmq.errors import InputError
from tests import data_set_folders
from tests.read_data_sets import labels_of, read, words

CAPTIONS = {"1": ("a dog runs", "a brown dog"), "2": ("a red car",), "3": ("two boats | at sea",)}


def photos(folder: Path) -> dict[str, Path]:
    """Three photos, by number."""
    paths = {number: folder / f"{number}.png" for number in CAPTIONS}
    for number, path in paths.items():
        data_set_folders.photo(path, int(number))
    return paths


def with_texts(folder: Path) -> tuple[str, Path]:
    for number, path in photos(folder).items():
        path.with_suffix(".txt").write_text("\n".join(CAPTIONS[number]) + "\n\n")
    (folder / "README.txt").write_text("no picture of this name")
    return "folder", folder


def imagefolder(folder: Path) -> tuple[str, Path]:
    photos(folder)
    lines = [{"file_name": f"{number}.png", "captions": list(CAPTIONS[number]), "width": 16} for number in CAPTIONS]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return "folder", folder


def table(folder: Path, **more: list[Any]) -> Any:
    arrow = pytest.importorskip("pyarrow")
    images = [{"bytes": path.read_bytes(), "path": path.name} for path in photos(folder / "src").values()]
    return arrow.table({"image": images, "caption": list(map(list, CAPTIONS.values())), **more})


def parquet(folder: Path) -> tuple[str, Path]:
    found = table(folder)
    pytest.importorskip("pyarrow.parquet").write_table(found, folder / "photos.parquet", row_group_size=2)
    return "parquet", folder / "photos.parquet"


def arrow_stream(folder: Path) -> tuple[str, Path]:
    arrow, found = pytest.importorskip("pyarrow"), table(folder)
    with arrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), found.schema) as writer:
        writer.write_table(found, max_chunksize=2)
    return "parquet", folder


def tar(folder: Path) -> tuple[str, Path]:
    with tarfile.open(folder / "00000.tar", "w") as archive:
        for number, path in photos(folder / "src").items():
            add(archive, f"set/{number}.png", path.read_bytes())
            if number == "1":
                add(archive, f"set/{number}.txt", "\n".join(CAPTIONS[number]).encode())
            else:
                add(archive, f"set/{number}.json", json.dumps({"caption": CAPTIONS[number][0], "width": 16}).encode())
    return "webdataset", folder


def add(archive: tarfile.TarFile, name: str, content: bytes, **about: Any) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in about.items():
        setattr(info, key, value)
    archive.addfile(info, io.BytesIO(content))


FORMS: Mapping[str, Callable[[Path], tuple[str, Path]]] = {
    "texts": with_texts,
    "imagefolder": imagefolder,
    "parquet": parquet,
    "arrow": arrow_stream,
    "tar": tar,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_same_images_and_captions(form: str, tmp_path: Path) -> None:
    name, path = FORMS[form](tmp_path)
    found, again = read(name, path), read(name, path)
    assert found.captions == tuple(CAPTIONS.values())
    expected = read(*with_texts(tmp_path.parent / f"{form}-texts"))
    for row in (2, 0, 1):
        assert np.array_equal(found.images.frames(row)[0], expected.images.frames(row)[0])
    assert len(set(found.keys)) == len(set(found.images.contents())) == 3
    part = found.subset([2, 1])
    assert np.array_equal(part.images.frames(0)[0], found.images.frames(2)[0])
    assert found.images.stamps() == again.images.stamps()


def splits_of(found: RawSet) -> dict[str, list[str]]:
    pairs = list(zip(found.keys, words(found), strict=True))
    return {name: [key for key, word in pairs if word == name] for _, name in pairs}


def test_folders_of_splits_are_the_splits(tmp_path: Path) -> None:
    for name, numbers in (("train", (1, 2)), ("validation", (3,)), ("test", (4,))):
        for number in numbers:
            data_set_folders.photo(tmp_path / name / f"{number}.jpg", number)
            (tmp_path / name / f"{number}.txt").write_text(f"photo {number}")
    expected = {"train": ["train/1.jpg", "train/2.jpg"], "val": ["validation/3.jpg"], "test": ["test/4.jpg"]}
    assert splits_of(read("folder", tmp_path)) == expected
    for name, numbers in (("train", (1, 2)), ("validation", (3,)), ("test", (4,))):
        lines = "".join(f"{number}.jpg,listed {number}\n" for number in numbers)
        (tmp_path / name / "metadata.csv").write_text(f"file_name,text\n{lines}")
    listed = read("folder", tmp_path)
    assert splits_of(listed) == expected
    assert set(listed.captions) == {(f"listed {number}",) for number in (1, 2, 3, 4)}


def test_parquet_files_named_after_splits_and_labels_with_names_are_understood(tmp_path: Path) -> None:
    arrow, write = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet").write_table
    about = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    for name in ("train-00000-of-00001", "test-00000-of-00001"):
        made = table(tmp_path / name, label=[0, 1, -1]).replace_schema_metadata({"huggingface": json.dumps(about)})
        write(made, tmp_path / f"{name}.parquet")
    found = read("parquet", tmp_path)
    assert words(found) == ["test"] * 3 + ["train"] * 3
    assert [labels_of(found, row) for row in range(3)] == [["cat"], ["dog"], []]
    assert found.keys[0] == "test-00000-of-00001/000000"
    paths = arrow.table({"image": ["1.png", "../2.png"], "text": ["a", "b"]})
    write(paths, tmp_path / "paths.parquet")
    with pytest.raises(InputError, match=r"image\[1\]: found '../2.png', allowed: the path of an image in the folder"):
        read("parquet", tmp_path / "paths.parquet")


@pytest.mark.parametrize(
    "columns",
    [
        {"labels": ["['dog', 'sky']", "dog", "sky"]},
        {"labels": ["dog,sky", "dog", "sky"]},
        {"labels": [["dog"], ["['sky']"], []]},
        {"caption": ["['a dog', 'a cat']", "a", "b"]},
        {"caption": [["a"], ['["a dog", "a cat"]'], ["b"]]},
    ],
)
def test_texts_that_hold_a_list_are_refused_in_collections(columns: dict[str, list[Any]], tmp_path: Path) -> None:
    made = table(tmp_path)
    for name, values in columns.items():
        rest = made.drop_columns([name]) if name in made.column_names else made
        pytest.importorskip("pyarrow.parquet").write_table(rest.append_column(name, [values]), tmp_path / "p.parquet")
    with pytest.raises(InputError, match=r"p\.parquet.*allowed: .*list"):
        read("parquet", tmp_path / "p.parquet")
    with tarfile.open(tmp_path / "00000.tar", "w") as archive:
        for row in range(3):
            add(archive, f"{row}.png", (tmp_path / "src" / f"{row + 1}.png").read_bytes())
            about = {"caption": "a"} | {name: values[row] for name, values in columns.items()}
            add(archive, f"{row}.json", json.dumps(about).encode())
    with pytest.raises(InputError, match=r"00000\.tar.*allowed: .*list"):
        read("webdataset", tmp_path / "00000.tar")


def test_labels_with_one_meaning_are_one_label_in_collections_and_odd_captions_stay(tmp_path: Path) -> None:
    odd = ["['quoted' by a camera]", "[b]", "{a}"]
    made = table(tmp_path, labels=[["caf\xe9"], ["cafe\u0301"], ["hot  dog", "hot dog"]]).drop_columns(["caption"])
    write = pytest.importorskip("pyarrow.parquet").write_table
    write(made.append_column("caption", [odd]), tmp_path / "p.parquet")
    found = read("parquet", tmp_path / "p.parquet")
    assert found.label_names == ("caf\xe9", "hot dog")
    assert found.captions == tuple((caption,) for caption in odd)


def test_archives_with_the_same_names_are_joined_and_class_files_are_labels(tmp_path: Path) -> None:
    for number in (0, 1):
        with tarfile.open(tmp_path / f"0000{number}.tar", "w") as archive:
            data_set_folders.photo(tmp_path / "p.jpg", number)
            add(archive, "0.jpg", (tmp_path / "p.jpg").read_bytes())
            add(archive, "0.cls", str(number).encode())
            add(archive, "0.txt", b"one")
            add(archive, "__MACOSX/._0.txt", b"\xff")
            add(archive, "0.npy", b"ignored")
    found = read("webdataset", tmp_path)
    assert found.keys == ("00000/0", "00001/0")
    assert [labels_of(found, row) for row in (0, 1)] == [["0"], ["1"]]


def test_the_headers_of_an_archive_are_bounded(tmp_path: Path) -> None:
    vast, nested = tarfile.TarInfo("x"), tarfile.TarInfo("x")
    vast.type, vast.size = tarfile.XHDTYPE, 3 << 30
    nested.type = tarfile.XHDTYPE
    for content, what in ((vast.tobuf(), "bytes of memory"), (nested.tobuf() * 5000, "recursion")):
        (tmp_path / "0.tar").write_bytes(content)
        with pytest.raises(InputError, match=what):
            read("webdataset", tmp_path / "0.tar")


HOSTILE: Mapping[str, tuple[str, bytes, dict[str, Any], str]] = {
    "link": ("1.jpg", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, "1.jpg: found 'a link, a device"),
    "hard link": ("1.jpg", b"", {"type": tarfile.LNKTYPE, "linkname": "0.jpg"}, "1.jpg: found 'a link, a device"),
    "device": ("1.jpg", b"", {"type": tarfile.CHRTYPE}, "found 'a link, a device"),
    "absolute": ("/etc/1.jpg", b"", {}, "a path that leads out of the archive"),
    "parent": ("../1.jpg", b"", {}, "a path that leads out of the archive"),
    "json": ("0.json", b'{"caption": ', {}, "0.json: found .*valid JSON"),
    "json list": ("0.json", b"[1]", {}, "0.json: found 'list', allowed: a JSON object"),
    "caption": ("0.json", b'{"caption": {"a": 1}}', {}, "0.json: caption: found"),
    "deep json": ("0.json", b"[" * 100_000, {}, "0.json: found"),
    "text": ("0.txt", b"\xff\xfe\xff", {}, "0.txt: found 'bytes that are not UTF-8'"),
    "second image": ("0.png", b"", {}, "0.png: found 'a second image next to 0.jpg'"),
    "no image": ("9.txt", b"alone", {}, "9: found 'captions without an image'"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_archive_is_refused_in_one_line(what: str, tmp_path: Path) -> None:
    name, content, about, words_ = HOSTILE[what]
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        add(archive, "0.jpg", b"picture")
        add(archive, name, content, **about)
    with pytest.raises(InputError, match=words_) as caught:
        read("webdataset", path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["parquet", "arrow", "tar"])
def test_a_damaged_file_is_refused_in_one_line(form: str, tmp_path: Path) -> None:
    name, path = FORMS[form](tmp_path)
    file = tmp_path / {"parquet": "photos.parquet", "arrow": "data-00000-of-00001.arrow", "tar": "00000.tar"}[form]
    whole = file.read_bytes()
    for content in (b"", b"PAR1", whole[: len(whole) // 3], b"\x1f\x8b" + whole):
        file.write_bytes(content)
        with pytest.raises(InputError) as caught:
            read(name, path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "words_"),
    [
        ({}, "no image"),
        ({"a.png": None}, "1 images, none with captions.*a.txt for a.jpg"),
        ({"metadata.csv": "file_name,text\n../a.png,one\nb.png,two\n"}, "line 2: file_name: found '../a.png'"),
        ({"metadata.csv": "file_name,text\n/etc/a.png,one\nb.png,two\n"}, "line 2: file_name: found '.*etc/a.png'"),
        ({"metadata.csv": "", "metadata.jsonl": ""}, "metadata.csv and metadata.jsonl', allowed: one of the two"),
        ({"a.png": None, "a.txt": "x" * ((1 << 20) + 1)}, "a.txt: found '1,048,577 bytes'"),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused_in_one_line(
    files: Mapping[str, str | None], words_: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        if content is None:
            data_set_folders.photo(tmp_path / name, 1)
        else:
            (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=words_) as caught:
        read("folder", tmp_path)
    assert "\n" not in str(caught.value)


def test_a_row_without_a_image_is_named(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    made = arrow.table({"image": [None, {"bytes": b"no picture", "path": ""}], "text": ["a", "b"]})
    pytest.importorskip("pyarrow.parquet").write_table(made, tmp_path / "a.parquet")
    found = read("parquet", tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a.parquet: image\[0\]: found 'no image'"):
        found.images.frames(0)
    with pytest.raises(InputError, match=r"a.parquet: image\[1\]: found 'no image that Pillow can read'"):
        found.images.frames(1)
    with pytest.raises(InputError, match="a column of captions"):
        pytest.importorskip("pyarrow.parquet").write_table(made.drop_columns(["text"]), tmp_path / "b.parquet")
        read("parquet", tmp_path / "b.parquet")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_damage_anywhere_is_an_error_and_does_not_kill_the_process(form: str, tmp_path: Path) -> None:
    name, path = FORMS[form](tmp_path)
    file = tmp_path / {"parquet": "photos.parquet", "arrow": "data-00000-of-00001.arrow"}[form]
    whole = file.read_bytes()
    refused = 0
    for start in range(0, len(whole), 8):
        file.unlink()  # the old file may still be mapped into memory
        file.write_bytes(whole[:start] + b"\x7f" * 8 + whole[start + 8 :])
        try:
            found = read(name, path)
            for row in range(len(found)):
                found.images.frames(row)
        except InputError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 50
