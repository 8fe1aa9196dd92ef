"""A user's own data set: a manifest in JSONL or CSV."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedmq.errors import InputError
from tests import data_set_folders
from tests.read_data_sets import ROWS, labels_of, read, words


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
    path = data_set_folders.write(
        tmp_path / "list.csv", "image,captions,labels,split\na.png,one|two,x|y,train\nin/b.png,three,y,test\n"
    )
    found = read("manifest", path)
    assert (found.keys, found.captions, found.label_names) == (whole.keys, whole.captions, whole.label_names)
    assert found.image_digest == whole.image_digest


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("list.jsonl", '{"image": "a.png"}\n{', r"line 2.*valid JSON"),
        ("list.jsonl", '{"image": "a.png", "colour": 1}', r"line 1: found 'colour'"),
        ("list.jsonl", '{"caption": "a"}\n{"label": "x"}', "line 2: image: found 'neither an image nor a caption'"),
        ("list.csv", "image,caption\na,b\n ,\n", "line 3: image: found 'neither"),
        ("list.jsonl", '{"image": 3, "caption": "a"}', "line 1: image: found '3'"),
        ("list.csv", "labels,split\na,train\n", "line 1: found 'columns labels, split', allowed: a column image"),
        ("list.jsonl", '{"image": "a", "captions": 3}', r"line 1: captions"),
        (
            "list.jsonl",
            '{"image": "a", "key": 1}\n{"image": "b", "key": 1}',
            r"line 2: image of the item '1': found 'b'",
        ),
        ("list.jsonl", '{"image": "a", "split": "val"}\n{"image": "./a"}', r"line 2: split: found 'nothing', .*line 1"),
        ("list.csv", "image,split\na,train\na,test\n", "line 3: split: found 'test', allowed: train, as in line 2"),
        ("list.jsonl", '{"image": "a", "split": "train"}\n\n{"image": "b"}', "line 3: split: found 'nothing'"),
        ("list.jsonl", '{"image": "a", "split": "dev"}', "line 1: split: found 'dev', allowed: train, val"),
        ("list.csv", "image,caption,labels\na,b,x\nc,d\n", r"line 3: found '2 fields', allowed: as many fields"),
        ("list.jsonl", "7", "line 1: found 'int'"),
        ("list.jsonl", '{"image": "a", "caption": "x\u2028y"}', "1 items"),
        ("list.csv", "image,caption\na,b,c\n", r"line 2.*as many fields"),
        ("list.csv", "drawing\na\n", "line 1: found 'drawing'"),
        ("list.txt", "", r"\.csv, \.tsv, \.jsonl"),
        (
            "list.tsv",
            "filepath\ttitle\na,b\n",
            "line 2: found '1 fields', allowed: as many fields",
        ),
        ("list.csv", "image,filepath,caption\na,b,c\n", "line 1: found 'columns image and filepath'"),
        ("list.jsonl", '{"image": "a", "file_name": "b"}', "line 1: found 'fields image and file_name'"),
        ("list.csv", "image,labels,labels\na,b,c\n", "line 1: found \"'labels' twice\""),
        ("list.jsonl", '{"image": "a", "caption": "x", "caption": "y"}', "line 1: found \"'caption' twice\""),
        ("list.csv", "image,caption\na,b\n.,c\n", r"line 3: image: found '\.'"),
        ("list.jsonl", '{"image": "a"}\n{"image": ".."}', r"line 2: image: found '\.\.'"),
        ("list.jsonl", '{"image": "a", "caption": "cut \\ud83d"}', "line 1: caption: found .*whole characters"),
        ("list.jsonl", '{"image": "\\ud83d.jpg"}', "line 1: image: found .*whole characters"),
        ("list.jsonl", '{"image": "a", "key": "\\ud83d"}\n{"image": "b"}', "whole characters"),
        ("list.jsonl", '{"image": "a", "label": "\\ud83d"}\n{"image": "b"}', "line 1: labels?: .*whole characters"),
        ("list.jsonl", '{"image": "a", "key": []}', "line 1: key: found"),
    ],
)
def test_errors_in_a_manifest_name_the_line(name: str, content: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=expected) as caught:
        read("manifest", data_set_folders.write(tmp_path / name, content))
    str(caught.value).encode()


OTHER_PROGRAMS = {
    "open_clip.csv": "filepath\ttitle\na.png\tone | two, three\nb.png\tfour\n",
    "open_clip.tsv": 'filepath\ttitle\na.png\t"one | two, three"\nb.png\tfour\n',
    "commas.csv": 'filepath,title\na.png,"one | two, three"\nb.png,four\n',
    "metadata.csv": 'file_name,text\na.png,"one | two, three"\nb.png,four\n',
    "metadata.jsonl": '{"file_name": "a.png", "text": "one | two, three"}\n{"file_name": "b.png", "text": "four"}\n',
}


@pytest.mark.parametrize("name", OTHER_PROGRAMS)
def test_lists_of_open_clip_and_of_hugging_face_are_read_as_they_are(name: str, tmp_path: Path) -> None:
    found = read("manifest", data_set_folders.write(tmp_path / name, OTHER_PROGRAMS[name]))
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
    found = read("manifest", data_set_folders.write(tmp_path / name, ONE_CAPTION_A_LINE[name]))
    assert found.keys == ("a.png", "b.png")
    assert found.captions == (("one", "three"), ("two",))
    assert [labels_of(found, row) for row in (0, 1)] == [["x", "z"], ["y"]]


def test_items_may_lack_their_image_or_their_captions(tmp_path: Path) -> None:
    content = "image,caption,key\na.png,one,\n,two,\nb.png,,\n,three,k\n"
    found = read("manifest", data_set_folders.write(tmp_path / "list.csv", content))
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
    texts = read("manifest", data_set_folders.write(tmp_path / "texts.csv", "captions\none\ntwo\n"))
    assert not texts.with_image.any()


def test_a_line_without_an_image_adds_a_caption_to_the_item_of_its_key(tmp_path: Path) -> None:
    content = "image,caption,key\n,one,7\na.png,two,7\nb.png,three,8\n"
    found = read("manifest", data_set_folders.write(tmp_path / "list.csv", content))
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
    found = read("manifest", data_set_folders.write(tmp_path / name, content))
    assert found.captions == (("one", "two", "three"), ("four",))


def test_a_byte_order_mark_before_jsonl_and_a_key_of_zero_are_accepted(tmp_path: Path) -> None:
    content = '{"image": "a", "key": 0}\n{"image": "b", "key": ""}\n'
    assert read("manifest", data_set_folders.write(tmp_path / "list.jsonl", content, "utf-8-sig")).keys == ("0", "b")


def test_a_byte_order_mark_before_csv_is_skipped_and_undecodable_text_is_reported_with_its_line(tmp_path: Path) -> None:
    path = data_set_folders.write(tmp_path / "list.csv", "image,caption\na,one\nb,two\n", "utf-8-sig")
    assert read("manifest", path).captions == (("one",), ("two",))
    path.write_bytes(b"image,caption\na,one\nb,tw\xff\n")
    with pytest.raises(InputError, match=r"list\.csv: line 3: .*UTF-8 text"):
        read("manifest", path)


def test_a_folder_of_frames_in_a_manifest_is_read_as_a_video(tmp_path: Path) -> None:
    data_set_folders.msrvtt(tmp_path)
    rows = [f'{{"image": "frames/video{row}", "caption": "x"}}\n' for row in range(4)]
    path = data_set_folders.write(tmp_path / "list.jsonl", "".join(rows))
    found = read("manifest", path)
    assert found.images.clips
    assert len(found.images.frames(1)) == 12
    once = read("manifest", path, frames=1)
    assert len(once.images.frames(1)) == 1
    # The manifest's parent folder contains no frames.
    data_set_folders.write(path, rows[0] + '{"image": "frames/..", "caption": "x"}\n')
    with pytest.raises(InputError, match=r"line 2: image: found 'frames/\.\.'"):
        read("manifest", path)
