"""A user's own images and captions: folders, lists, Parquet and Arrow files, tars of webdataset."""

from __future__ import annotations

import json
import tarfile
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmq.data.labels import one_spelling
from fedmq.data.raw_set import RawSet
from fedmq.data.readers.manifest import captions_in_cell, labels_in_cell, texts_of
from fedmq.errors import InputError
from tests import data_set_folders
from tests.data_set_folders import CAPTIONS, FORMS, add, photo, table, with_texts, write
from tests.read_data_sets import ROWS, labels_of, read, words


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
            photo(tmp_path / name / f"{number}.jpg", number)
            (tmp_path / name / f"{number}.txt").write_text(f"photo {number}")
    expected = {"train": ["train/1.jpg", "train/2.jpg"], "val": ["validation/3.jpg"], "test": ["test/4.jpg"]}
    assert splits_of(read("folder", tmp_path)) == expected
    for name, numbers in (("train", (1, 2)), ("validation", (3,)), ("test", (4,))):
        lines = "".join(f"{number}.jpg,listed {number}\n" for number in numbers)
        (tmp_path / name / "metadata.csv").write_text(f"file_name,text\n{lines}")
    listed = read("folder", tmp_path)
    assert splits_of(listed) == expected
    assert set(listed.captions) == {(f"listed {number}",) for number in (1, 2, 3, 4)}


def in_folders(folder: Path, items: Mapping[str, int]) -> tuple[str, Path]:
    for part, count in items.items():
        for number in range(count):
            photo(folder / part / f"{number}.png", number)
            (folder / part / f"{number}.txt").write_text(f"{part} {number}")
    return "folder", folder


def in_archives(folder: Path, items: Mapping[str, int]) -> tuple[str, Path]:
    photo(folder.parent / "one.png", 1)
    for part, count in items.items():
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(folder / f"{part}-000000.tar", "w") as archive:
            for number in range(count):
                add(archive, f"{number}.png", (folder.parent / "one.png").read_bytes())
                add(archive, f"{number}.txt", f"{part} {number}".encode())
    return "webdataset", folder


def in_tables(folder: Path, items: Mapping[str, int]) -> tuple[str, Path]:
    arrow, save = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet").write_table
    for part, count in items.items():
        path = folder / f"{part}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        photo(folder.parent / "one.png", 1)
        images = [{"bytes": (folder.parent / "one.png").read_bytes(), "path": None}] * count
        save(arrow.table({"image": images, "caption": [f"{part} {number}" for number in range(count)]}), path)
    return "parquet", folder


@pytest.mark.parametrize("form", [in_folders, in_archives, in_tables])
@pytest.mark.parametrize(
    ("train", "test", "more"),
    [
        ("train", "test", {}),
        ("Train", "TEST", {}),
        ("train2017", "val2017", {}),
        ("images/train", "images/test", {}),
        ("photos-training", "photos-testing", {}),
        ("train", "test", {"unsupervised": 2}),
    ],
)
def test_parts_named_as_people_name_them_are_the_split_and_what_is_outside_of_them_is_named(
    form: Callable[[Path, Mapping[str, int]], tuple[str, Path]],
    train: str,
    test: str,
    more: Mapping[str, int],
    tmp_path: Path,
) -> None:
    found = read(*form(tmp_path / "data", {train: 3, test: 2, **more}))
    assert words(found) == ["train"] * 3 + ["test"] * 2 or words(found) == ["test"] * 2 + ["train"] * 3
    outside = [key for keys in found.ignored.values() for key in keys]
    assert len(outside) == sum(more.values()) and all("unsupervised" in key for key in outside)


def test_what_looks_like_a_split_and_is_not_read_as_one_is_named(tmp_path: Path) -> None:
    found = read(*in_folders(tmp_path / "photos", {"train": 3, "cat": 2}))
    assert found.split is None and found.split_remark.startswith("train looks like a split")
    lines = "".join(f"photos/{part}/0.png,one of {part}\n" for part in ("train", "cat"))
    listed = read("manifest", write(tmp_path / "list.csv", f"image,caption\n{lines}"))
    assert listed.split is None and "train" in listed.split_remark


def test_images_that_no_list_names_and_files_of_other_kinds_are_named(tmp_path: Path) -> None:
    for part in ("train", "test"):
        photo(tmp_path / part / "1.png", 1)
        photo(tmp_path / part / "2.png", 2)
    lines = "1.png,a wall\n2.png,a door\n"
    write(tmp_path / "train" / "metadata.csv", f"file_name,text\n{lines}")
    write(tmp_path / "notes.md", "taken in 2026")
    found = read("folder", tmp_path)
    assert len(found) == 2
    assert found.ignored == {
        "images that no list names": ("test/1.png", "test/2.png"),
        "files of other kinds": ("notes.md",),
    }
    listed = read("manifest", write(tmp_path / "test" / "list.csv", "image,caption\n../train/1.png,a\n1.png,b\n"))
    assert listed.ignored == {"images that the list does not name": ("../train/2.png", "2.png")}


def test_names_with_dots_in_archives_are_items_if_they_make_an_image_with_captions(tmp_path: Path) -> None:
    photo(tmp_path / "one.png", 1)
    content = (tmp_path / "one.png").read_bytes()
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        for key in ("0", "1", "scan.00", "scan.01"):
            add(archive, f"{key}.png", content)
            add(archive, f"{key}.txt", f"photo {key}".encode())
        add(archive, "0.seg.png", content)
        add(archive, "lonely.json", b"{}")
    found = read("webdataset", tmp_path / "all.tar")
    assert found.keys == ("0", "1", "scan.00", "scan.01")
    assert found.captions[3] == ("photo scan.01",)
    assert found.ignored == {"files of other endings": ("0.seg.png",), "samples without an image": ("lonely",)}


def test_a_split_is_read_by_name_in_any_case_or_by_number(tmp_path: Path) -> None:
    rows = [f"{number}.png,a wall,{split}" for number, split in enumerate(("0", "Train", "2", " TEST"))]
    found = read("manifest", write(tmp_path / "list.csv", "\n".join(["image,caption,split", *rows])))
    assert words(found) == ["train", "train", "test", "test"]


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
            photo(tmp_path / "p.jpg", number)
            add(archive, "0.jpg", (tmp_path / "p.jpg").read_bytes())
            add(archive, "0.cls", str(number).encode())
            add(archive, "0.txt", b"one")
            add(archive, "__MACOSX/._0.txt", b"\xff")
            add(archive, "0.npy", b"ignored")
    found = read("webdataset", tmp_path)
    assert found.keys == ("00000/0", "00001/0")
    assert [labels_of(found, row) for row in (0, 1)] == [["0"], ["1"]]


# --- lists ----------------------------------------------------------------------------------------------------------


def test_paths_in_a_jsonl_manifest_are_relative_to_its_folder(tmp_path: Path) -> None:
    found = read("manifest", data_set_folders.manifest(tmp_path, ROWS))
    assert found.keys == ("a.png", "in/b.png")
    assert found.captions == (("one", "two"), ("three",))
    assert [labels_of(found, row) for row in (0, 1)] == [["x", "y"], ["y"]]
    assert words(found) == ["train", "test"]
    assert found.images.frames(1)[0].shape == (16, 16, 3)


def test_captions_in_which_nothing_is_visible_are_left_out(tmp_path: Path) -> None:
    rows = [
        {"image": "a.png", "captions": ["\u200b", "\u2060 \ufeff", "a dog", "\U0001f415"]},
        {"image": "b.png", "caption": "\xad"},
    ]
    assert read("manifest", data_set_folders.manifest(tmp_path, rows)).captions == (("a dog", "\U0001f415"), ())


def test_a_csv_manifest_is_read_as_the_same_data_set(tmp_path: Path) -> None:
    whole = read("manifest", data_set_folders.manifest(tmp_path, ROWS))
    path = write(tmp_path / "list.csv", "image,captions,labels,split\na.png,one|two,x|y,train\nin/b.png,three,y,test\n")
    found = read("manifest", path)
    assert (found.keys, found.captions, found.label_names) == (whole.keys, whole.captions, whole.label_names)
    assert found.image_digest == whole.image_digest


OTHER_PROGRAMS = {
    "open_clip.csv": "filepath\ttitle\na.png\tone | two, three\nb.png\tfour\n",
    "open_clip.tsv": 'filepath\ttitle\na.png\t"one | two, three"\nb.png\tfour\n',
    "commas.csv": 'filepath,title\na.png,"one | two, three"\nb.png,four\n',
    "metadata.csv": 'file_name,text\na.png,"one | two, three"\nb.png,four\n',
    "metadata.jsonl": '{"file_name": "a.png", "text": "one | two, three"}\n{"file_name": "b.png", "text": "four"}\n',
}


@pytest.mark.parametrize("name", OTHER_PROGRAMS)
def test_lists_of_open_clip_and_of_hugging_face_are_read_as_they_are(name: str, tmp_path: Path) -> None:
    found = read("manifest", write(tmp_path / name, OTHER_PROGRAMS[name]))
    assert found.keys == ("a.png", "b.png")
    assert found.captions == (("one | two, three",), ("four",))


ONE_CAPTION_A_LINE = {
    "list.csv": "image,caption,labels\na.png,one,x\nb.png,two,y\n./a.png,three,x\na.png,one,z\n",
    "list.jsonl": '{"image": "a.png", "caption": "one", "label": "x"}\n'
    '{"image": "b.png", "caption": "two", "label": "y"}\n'
    '{"image": "./a.png", "caption": "three", "label": "x"}\n{"image": "a.png", "caption": "one", "label": "z"}\n',
    "keyed.csv": "key,image,caption,label\na.png,p,one,x\nb.png,q,two,y\na.png,p,three,x|z\n",
}


@pytest.mark.parametrize("name", ONE_CAPTION_A_LINE)
def test_lines_of_one_image_or_key_are_one_item_with_all_their_captions(tmp_path: Path, name: str) -> None:
    found = read("manifest", write(tmp_path / name, ONE_CAPTION_A_LINE[name]))
    assert found.keys == ("a.png", "b.png")
    assert found.captions == (("one", "three"), ("two",))
    assert [labels_of(found, row) for row in (0, 1)] == [["x", "z"], ["y"]]


def test_items_may_lack_their_image_or_their_captions(tmp_path: Path) -> None:
    content = "image,caption,key\na.png,one,\n,two,\nb.png,,\n,three,k\n"
    found = read("manifest", write(tmp_path / "list.csv", content))
    assert found.keys == ("a.png", "line 3", "b.png", "k")
    assert found.captions == (("one",), ("two",), (), ("three",))
    present = found.present("sentences")
    assert present is not None
    assert present.tolist() == [[True, True], [False, True], [True, False], [False, True]]
    some = found.subset([3, 2, 0])
    assert some.with_image.tolist() == [False, True, True]
    assert [some.images.name(row) for row in range(3)] == [
        "no image",
        *map(str, (tmp_path / "b.png", tmp_path / "a.png")),
    ]
    texts = read("manifest", write(tmp_path / "texts.csv", "captions\none\ntwo\n"))
    assert not texts.with_image.any()


def test_a_line_without_an_image_adds_a_caption_to_the_item_of_its_key(tmp_path: Path) -> None:
    content = "image,caption,key\n,one,7\na.png,two,7\nb.png,three,8\n"
    found = read("manifest", write(tmp_path / "list.csv", content))
    assert found.captions == (("one", "two"), ("three",))
    assert found.with_image.all()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("list.csv", "image,caption,caption,captions,split\na,one,two,|three|one,train\nb,four,,,test\n"),
        (
            "list.jsonl",
            '{"image": "a", "captions": ["one", "two"], "caption": "three"}\n{"image": "b", "caption": "four"}\n',
        ),
    ],
)
def test_several_caption_fields_are_combined(name: str, content: str, tmp_path: Path) -> None:
    found = read("manifest", write(tmp_path / name, content))
    assert found.captions == (("one", "two", "three"), ("four",))


def test_byte_order_marks_are_skipped_and_a_key_of_zero_is_a_key(tmp_path: Path) -> None:
    content = '{"image": "a", "key": 0}\n{"image": "b", "key": ""}\n'
    assert read("manifest", write(tmp_path / "list.jsonl", content, "utf-8-sig")).keys == ("0", "b")
    path = write(tmp_path / "list.csv", "image,caption\na,one\nb,two\n", "utf-8-sig")
    assert read("manifest", path).captions == (("one",), ("two",))


def test_a_folder_of_frames_in_a_manifest_is_read_as_a_video(tmp_path: Path) -> None:
    data_set_folders.msrvtt(tmp_path)
    rows = [f'{{"image": "frames/video{row}", "caption": "x"}}\n' for row in range(4)]
    path = write(tmp_path / "list.jsonl", "".join(rows))
    found = read("manifest", path)
    assert found.images.clips
    assert len(found.images.frames(1)) == 12
    once = read("manifest", path, frames=1)
    assert len(once.images.frames(1)) == 1


# --- cells ----------------------------------------------------------------------------------------------------------

LABELS = [
    ("dog|sky", ["dog", "sky"]),
    ("['dog', 'sky']", ["dog", "sky"]),
    ('["dog", "sky"]', ["dog", "sky"]),
    ("('dog', 'sky',)", ["dog", "sky"]),
    ("{'dog'}", ["dog"]),
    ("[1, 2]", ["1", "2"]),
    ("[]", []),
    ("", [""]),
    ("nan", []),
    ("dog|nan", ["dog"]),
    ("hot dog", ["hot dog"]),
    ("shoes, boots|", ["shoes, boots", ""]),
    ('["it\'s", "a \\"b\\""]', ["it's", 'a "b"']),
]


def test_labels_separated_by_bars_and_lists_of_labels_are_read() -> None:
    for cell, labels in LABELS:
        assert labels_in_cell("here", cell) == labels, cell


NO_LABEL = [
    "dog,sky", "dog; sky", "dog\nsky", "['dog' 'sky']", "['dog', sky]", "[dog, sky]", "{'dog': 1}", "['dog'", "[1 2]",
    "dog\uff0csky", "dog\u3001sky", "dog\uff1bsky", "<dog><sky>", "[b'dog', b'sky']", "b'dog'",
    "array(['dog'])", "Index(['dog'], dtype='object')", "['dog', nan]", "[['dog'], ['sky']]", "['dog', '\\x']",
]  # fmt: skip


def test_cells_that_look_like_several_labels_but_cannot_be_read_are_refused() -> None:
    for cell in NO_LABEL:
        with pytest.raises(InputError, match=r"^here: found "):
            labels_in_cell("here", cell)


def test_captions_may_hold_commas_and_brackets_but_lists_of_them_are_read() -> None:
    assert captions_in_cell("here", "a dog, a cat; [laughs] (loudly)") == ["a dog, a cat; [laughs] (loudly)"]
    assert captions_in_cell("here", "[laughs] a man") == ["[laughs] a man"]
    assert captions_in_cell("here", "[applause]") == ["[applause]"]
    assert captions_in_cell("here", "['a, dog', \"it's\"]") == ["a, dog", "it's"]
    assert captions_in_cell("here", "nan") == []
    for cell in ("['a dog' 'a cat']", "b'a dog'", "[b'a dog', b'a cat']"):
        with pytest.raises(InputError, match="list of quoted texts"):
            captions_in_cell("here", cell)


@given(st.lists(st.text(st.characters(exclude_categories=["C"]), min_size=1)))
def test_every_list_that_python_or_json_writes_is_read(labels: list[str]) -> None:
    assert labels_in_cell("here", str(labels)) == labels
    assert labels_in_cell("here", json.dumps(labels)) == labels
    assert captions_in_cell("here", str(labels)) == labels


@given(
    st.lists(st.text("ab cd", min_size=1).map(str.strip).filter(bool), min_size=2, max_size=4), st.sampled_from(",;")
)
def test_several_words_with_another_separator_are_never_one_label(labels: list[str], separator: str) -> None:
    with pytest.raises(InputError, match="separated by"):
        labels_in_cell("here", f"{separator} ".join(labels))
    with pytest.raises(InputError, match="a list"):
        texts_of("here", f"{separator} ".join(labels), label=True)


def test_whole_numbers_with_and_without_decimals_are_one_label() -> None:
    assert one_spelling([("1",), ("1.0",), ("2.0", "dog"), ("2.5",), ("01",)]) == [
        ("1",), ("1",), ("2.0", "dog"), ("2.5",), ("01",)
    ]  # fmt: skip


@given(st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1), st.text(" \t\xa0\u3000", min_size=1))
def test_labels_that_differ_only_in_spaces_or_forms_of_characters_are_one(word: str, space: str) -> None:
    forms = [unicodedata.normalize(form, f"{word}{space}{word}") for form in ("NFC", "NFD")]
    several = [*forms, f"{word} {word}", f" {forms[1]}{space}"]
    found = one_spelling([(each,) for each in several])
    assert len(set(found)) == 1 and found[0][0] in several
    assert one_spelling([("Dog",), ("dog",)]) == [("Dog",), ("dog",)]


def test_a_column_of_numbers_that_pandas_wrote_with_gaps_has_the_labels_it_had_before(tmp_path: Path) -> None:
    path = write(tmp_path / "list.csv", "image,caption,labels\na,b,1\nc,d,1.0\ne,f,nan\ng,h,2.0\n")
    found = read("manifest", path)
    assert found.label_names == ("1", "2.0")
    assert [labels_of(found, row) for row in range(4)] == [["1"], ["1"], [], ["2.0"]]


def test_a_list_of_json_may_hold_labels_with_commas(tmp_path: Path) -> None:
    path = write(tmp_path / "l.jsonl", '{"image": "a", "labels": ["shoes, boots"]}\n{"image": "b"}')
    assert read("manifest", path).label_names == ("shoes, boots",)
