"""Every data set in the layout it is distributed in, whole and broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmq.config.scenario import Backbone, Data
from fedmq.data import catalogue
from fedmq.data.catalogue import SETS
from fedmq.data.raw_set import RawSet
from fedmq.data.splits import SPLITS, Draw, draw_parts, split_of
from fedmq.encoders import images as pictures
from fedmq.encoders.images import decode
from fedmq.errors import InputError
from tests import layouts

pytest.importorskip("PIL")


def read(name: str, path: Path, **options: Any) -> RawSet:
    data = Data(name=name, path=path, **options)
    return SETS[name].read(data)


def words(found: RawSet) -> list[str]:
    assert found.split is not None
    return [SPLITS[code] for code in found.split]


def labels_of(found: RawSet, row: int) -> list[str]:
    assert found.labels is not None
    return [name for name, hot in zip(found.label_names, found.labels[row], strict=True) if hot]


@pytest.mark.parametrize("name", ["flickr8k", "flickr30k"])
def test_karpathys_json_gives_captions_and_splits_in_its_order(name: str, tmp_path: Path) -> None:
    found = read(name, layouts.flickr(tmp_path, name))
    assert found.keys == tuple(f"{row}.jpg" for row in range(6))
    assert words(found) == list(layouts.SPLITS)
    assert [len(own) for own in found.captions] == [1, 2, 3, 1, 2, 3]
    assert found.captions[1][1] == "picture 1 as number 1 sees it"
    assert found.labels is None
    assert found.pictures.frames(0)[0].shape == (16, 20, 3)


def test_annotations_and_images_may_lie_elsewhere(tmp_path: Path) -> None:
    layouts.flickr(tmp_path / "a")
    (tmp_path / "a" / "images").rename(tmp_path / "photos")
    (tmp_path / "a" / "dataset_flickr8k.json").rename(tmp_path / "k.json")
    with pytest.raises(InputError, match=r"data\.annotations.*dataset_flickr8k\.json"):
        read("flickr8k", tmp_path / "a")
    found = read("flickr8k", tmp_path / "a", annotations=tmp_path / "k.json", images=tmp_path / "photos")
    assert not any(found.pictures.missing(row) for row in range(len(found)))


@pytest.mark.parametrize("text", ["Flickr8k_text", "."])
def test_flickr8ks_release_gives_the_photos_of_its_lists(text: str, tmp_path: Path) -> None:
    found = read("flickr8k", layouts.flickr8k_release(tmp_path, ["test", "val", "train", "train"], text))
    assert found.keys == ("102_00000002.jpg", "103_00000003.jpg", "101_00000001.jpg", "100_00000000.jpg")
    assert words(found) == ["train", "train", "val", "test"]
    assert found.captions[2] == tuple(f"Photo 1 as number {number} sees it ." for number in range(5))
    assert all(len(own) == 5 for own in found.captions)
    assert not any(found.pictures.missing(row) for row in range(len(found)))
    assert np.array_equal(found.pictures.frames(0)[0], decode(tmp_path / "Flicker8k_Dataset" / found.keys[0]))
    # The other name of the folder, and Karpathy's JSON comes first where it is there.
    (tmp_path / "Flicker8k_Dataset").rename(tmp_path / "Flickr8k_Dataset")
    assert not read("flickr8k", tmp_path).pictures.missing(0)
    layouts.flickr(tmp_path)
    assert read("flickr8k", tmp_path).keys[0] == "0.jpg"


def test_flickr8ks_release_may_lie_elsewhere(tmp_path: Path) -> None:
    whole = read("flickr8k", layouts.flickr8k_release(tmp_path / "set"))
    (tmp_path / "set" / "Flickr8k_text").rename(tmp_path / "notes")
    with pytest.raises(InputError, match=r"data\.annotations.*dataset_flickr8k\.json or .*Flickr8k\.token\.txt"):
        read("flickr8k", tmp_path / "set")
    for notes in (tmp_path / "notes", tmp_path / "notes" / "Flickr8k.token.txt"):
        found = read("flickr8k", tmp_path / "set", annotations=notes)
        assert (found.keys, found.captions) == (whole.keys, whole.captions)
    (tmp_path / "set" / "Flicker8k_Dataset").rename(tmp_path / "photos")
    found = read("flickr8k", tmp_path / "set", annotations=tmp_path / "notes", images=tmp_path / "photos")
    assert not any(found.pictures.missing(row) for row in range(len(found)))
    # The three lists may lie in the set's own folder.
    for path in (tmp_path / "notes").glob("Flickr_8k.*"):
        path.rename(tmp_path / "set" / path.name)
    assert read("flickr8k", tmp_path / "set", annotations=tmp_path / "notes", images=tmp_path).keys == whole.keys


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("Flickr8k.token.txt", "100.jpg#0\tgood\n\n100.jpg#1 no tab\n", r"line 3: found '100\.jpg#1 no tab'.*a tab"),
        ("Flickr8k.token.txt", "100.jpg\tno number\n", "line 1: found.*# and a number"),
        ("Flickr8k.token.txt", "100.jpg#x\tno number\n", "line 1: found.*# and a number"),
        ("Flickr8k.token.txt", "#0\tno name\n", "line 1: found.*a photo's name"),
        (
            "Flickr_8k.trainImages.txt",
            "100_00000000.jpg\n/etc/passwd\n",
            "line 2: found '/etc/passwd'.*without a folder",
        ),
        ("Flickr_8k.trainImages.txt", "../100_00000000.jpg\n", "line 1: found.*without a folder"),
        ("Flickr_8k.trainImages.txt", "104_00000004.jpg\n", r"'104_00000004\.jpg' twice"),
        ("Flickr_8k.devImages.txt", None, r"data\.annotations: found 'no list Flickr_8k\.devImages\.txt'"),
    ],
)
def test_what_is_wrong_in_flickr8ks_release_is_named(
    name: str, content: str | None, expected: str, tmp_path: Path
) -> None:
    file = layouts.flickr8k_release(tmp_path) / "Flickr8k_text" / name
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    with pytest.raises(InputError, match=expected) as caught:
        read("flickr8k", tmp_path)
    assert "\n" not in str(caught.value)


def test_wikipedias_lists_and_texts_may_lie_elsewhere(tmp_path: Path) -> None:
    whole = read("wikipedia", layouts.wikipedia(tmp_path / "set"))
    notes = tmp_path / "notes"
    notes.mkdir()
    for name in ("trainset_txt_img_cat.list", "testset_txt_img_cat.list"):
        (tmp_path / "set" / name).rename(notes / name)
    for _ in range(2):
        found = read("wikipedia", tmp_path / "set", annotations=notes)
        assert (found.keys, found.captions) == (whole.keys, whole.captions)
        assert not any(found.pictures.missing(row) for row in range(len(found)))
        if not (notes / "texts").exists():
            (tmp_path / "set" / "texts").rename(notes / "texts")
    with pytest.raises(InputError, match=r"elsewhere/trainset_txt_img_cat\.list.*no such file"):
        read("wikipedia", tmp_path / "set", annotations=tmp_path / "elsewhere")


@pytest.mark.parametrize("inner", ["Groundtruth/AllLabels", "AllLabels", "."])
def test_nuswides_labels_may_lie_elsewhere(inner: str, tmp_path: Path) -> None:
    whole = read("nuswide", layouts.nuswide(tmp_path / "set"))
    (tmp_path / "notes" / inner).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "set" / "Groundtruth" / "AllLabels").rename(tmp_path / "notes" / inner)
    with pytest.raises(InputError, match=r"data\.annotations.*AllLabels"):
        read("nuswide", tmp_path / "set")
    found = read("nuswide", tmp_path / "set", annotations=tmp_path / "notes")
    assert found.label_names == whole.label_names
    assert np.array_equal(found.labels, whole.labels)  # type: ignore[arg-type]


def test_images_of_iapr_are_a_folder_of_numbers_or_the_one_above(tmp_path: Path) -> None:
    layouts.iapr(tmp_path / "set")
    (tmp_path / "photos").mkdir()
    (tmp_path / "set" / "images").rename(tmp_path / "photos" / "images")
    for images in (tmp_path / "photos" / "images", tmp_path / "photos"):
        found = read("iapr", tmp_path / "set", images=images)
        assert not any(found.pictures.missing(row) for row in range(len(found)))
    (tmp_path / "photos" / "images" / "00" / "1.jpg").unlink()
    found = read("iapr", tmp_path / "set", images=tmp_path / "photos" / "images")
    assert [row for row in range(len(found)) if found.pictures.missing(row)] == [1]
    assert found.pictures.name(1) == str(tmp_path / "photos" / "images" / "00" / "1.jpg")


def test_coco_trains_on_restval_and_takes_its_labels_from_the_instances(tmp_path: Path) -> None:
    found = read("coco", layouts.coco(tmp_path))
    assert words(found) == ["train", "train", "val", "test", "test"]
    assert found.label_names == ("dog", "person")
    assert [labels_of(found, row) for row in range(5)] == [["dog"], ["dog", "person"], [], ["person"], []]
    assert found.pictures.frames(1)[0].shape == (16, 16, 3)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "valid JSON"),
        ("[]", "Karpathy's JSON"),
        (json.dumps({"images": [{"filename": "a.jpg", "split": "train"}]}), r"images\[0\]\.sentences: found None"),
        (json.dumps({"images": [{"filename": "a", "split": "tain", "sentences": []}] * 2}), "item 0: split: .*'tain'"),
        (json.dumps({"images": [{"filename": "a", "split": "test", "sentences": []}] * 2}), "'a' twice"),
        (
            json.dumps({"images": [{"filename": "", "split": "test", "sentences": []}] * 2}),
            r"images\[0\]\.filename: found ''",
        ),
        (
            json.dumps({"images": [{"filename": "a", "filepath": 5, "split": "test", "sentences": []}]}),
            r"images\[0\]\.filepath",
        ),
        ('{"images": [5]}', r"images\[0\]: found 5"),
        ('{"images": [{"filename": "a", "split": "test", "sentences": [{"raw": 1}]}]}', r"\.sentences\[0\]: found"),
        (
            '{"images": [{"filename": "a", "split": "test", "sentences": []}, '
            '{"filename": "b", "split": "test", "sentences": [{"raw": "cut \\ud83d"}]}]}',
            "'b': found 'cut .*whole char",
        ),
        (json.dumps({"images": []}), "0 items"),
    ],
)
def test_a_broken_annotation_file_is_one_line(content: str, expected: str, tmp_path: Path) -> None:
    layouts.flickr(tmp_path)
    (tmp_path / "dataset_flickr8k.json").write_text(content)
    with pytest.raises(InputError, match=expected) as caught:
        read("flickr8k", tmp_path)
    assert "\n" not in str(caught.value)


def test_coco_finds_its_labels_beside_annotations_that_lie_elsewhere(tmp_path: Path) -> None:
    layouts.coco(tmp_path / "set")
    (tmp_path / "notes").mkdir()
    (tmp_path / "set" / "dataset_coco.json").rename(tmp_path / "notes" / "dataset_coco.json")
    (tmp_path / "set" / "annotations").rename(tmp_path / "notes" / "annotations")
    found = read("coco", tmp_path / "set", annotations=tmp_path / "notes" / "dataset_coco.json")
    assert found.label_names == ("dog", "person")


def test_items_without_a_label_are_left_out_where_the_scenario_asks_for_it(tmp_path: Path) -> None:
    found = read("coco", layouts.coco(tmp_path), labelled=True)
    assert [labels_of(found, row) for row in range(len(found))] == [["dog"], ["dog", "person"], ["person"]]
    assert words(found) == ["train", "train", "test"]
    with pytest.raises(InputError, match=r"data\.labelled.*0 items with a label"):
        read("flickr8k", layouts.flickr(tmp_path), labelled=True)


def test_the_first_captions_alone_are_kept_where_the_scenario_asks_for_it(tmp_path: Path) -> None:
    folder = layouts.flickr(tmp_path)
    whole, one = read("flickr8k", folder), read("flickr8k", folder, captions=1)
    assert max(map(len, whole.captions)) > 1
    assert one.captions == tuple(own[:1] for own in whole.captions)
    assert read("flickr8k", folder, captions=99).captions == whole.captions


def test_a_folder_in_place_of_a_photo_is_unreadable_by_name(tmp_path: Path) -> None:
    folder = layouts.flickr(tmp_path)
    (folder / "images" / "1.jpg").unlink()
    layouts.photo(folder / "images" / "1.jpg" / "frame.jpg", 1)
    pictures = read("flickr8k", folder).pictures
    assert not pictures.missing(1)
    with pytest.raises(InputError, match=r"1\.jpg: found 'a folder'"):
        pictures.frames(1)


def test_linked_folders_are_followed_and_a_circle_of_links_ends(tmp_path: Path) -> None:
    layouts.pascal(tmp_path / "elsewhere")
    for name in ("dataset", "sentence"):
        (tmp_path / "set" / name).mkdir(parents=True)
        for inner in ("cat", "sofa"):
            (tmp_path / "set" / name / inner).symlink_to(tmp_path / "elsewhere" / name / inner)
    (tmp_path / "elsewhere" / "dataset" / "cat" / "again").symlink_to(tmp_path / "set" / "dataset")
    found = read("pascal", tmp_path / "set")
    assert found.keys == tuple(f"{('cat', 'sofa')[row % 2]}/2008_{row:06d}" for row in (0, 2, 4, 1, 3, 5))
    (tmp_path / "elsewhere" / "dataset" / "a-sofa").symlink_to(tmp_path / "elsewhere" / "dataset" / "sofa")
    assert read("pascal", tmp_path / "elsewhere").keys == found.keys
    layouts.iapr(tmp_path / "iapr")
    for name in ("annotations_complete_eng", "saiapr_tc-12"):
        (tmp_path / "iapr" / name / "00").rename(tmp_path / f"{name}-00")
        (tmp_path / "iapr" / name / "00").symlink_to(tmp_path / f"{name}-00")
    assert len(read("iapr", tmp_path / "iapr")) == 5
    assert read("iapr", tmp_path / "iapr").label_names == ("sky", "tree")
    layouts.msrvtt(tmp_path / "videos")
    (tmp_path / "videos" / "frames").rename(tmp_path / "frames")
    (tmp_path / "videos" / "frames").symlink_to(tmp_path / "frames")
    (tmp_path / "frames" / "video0" / "up").symlink_to(tmp_path / "videos")
    assert len(read("msrvtt", tmp_path / "videos").pictures.frames(3)) == 12


def test_msrvtts_whole_file_makes_its_parts_superfluous_wherever_they_lie(tmp_path: Path) -> None:
    layouts.msrvtt(tmp_path)
    whole = json.loads((tmp_path / "MSRVTT_data.json").read_text())
    assert len(whole["videos"]) > 2
    (tmp_path / "annotation").mkdir()
    (tmp_path / "MSRVTT_data.json").rename(tmp_path / "annotation" / "MSRVTT_data.json")
    part = {"videos": whole["videos"][:2], "sentences": whole["sentences"]}
    (tmp_path / "train_val_videodatainfo.json").write_text(json.dumps(part))
    assert len(read("msrvtt", tmp_path)) == len(whole["videos"])
    (tmp_path / "annotation" / "MSRVTT_data.json").rename(tmp_path / "annotation" / "train_val_videodatainfo.json")
    assert len(read("msrvtt", tmp_path)) == 2


@pytest.mark.parametrize("size", [(4, 5), (1, 1)])
def test_grey_values_of_16_bits_are_scaled_to_8(size: tuple[int, int], tmp_path: Path) -> None:
    from PIL import Image

    wide = np.linspace(0, 65535, size[0] * size[1]).reshape(size).astype(np.uint16)
    Image.fromarray(wide).save(tmp_path / "a.png")
    found = decode(tmp_path / "a.png")
    assert found.shape == (*size, 3)
    assert np.array_equal(found[..., 1], np.round(wide / 257).astype(np.uint8))


def test_pixels_of_which_nobody_knows_the_white_are_refused(tmp_path: Path) -> None:
    from PIL import Image

    Image.fromarray(np.array([[0.0, 1e6]], np.float32)).save(tmp_path / "a.tif")
    with pytest.raises(InputError, match=r"a\.tif: found \"grey values of Pillow's mode F\""):
        decode(tmp_path / "a.tif")
    Image.fromarray(np.array([[0.0, 255]], np.float32)).save(tmp_path / "b.tif")
    assert decode(tmp_path / "b.tif")[0, :, 0].tolist() == [0, 255]


def test_a_file_name_too_long_for_the_disk_is_a_missing_picture(tmp_path: Path) -> None:
    path = layouts.manifest(tmp_path, ROWS)
    layouts.write(path, path.read_text().replace("in/b.png", "a" * 300 + ".png"))
    assert [read("manifest", path).pictures.missing(row) for row in (0, 1)] == [False, True]
    layouts.wikipedia(tmp_path / "wiki")
    listed = tmp_path / "wiki" / "testset_txt_img_cat.list"
    layouts.write(listed, listed.read_text().replace("img3", "i" * 300))
    assert read("wikipedia", tmp_path / "wiki").pictures.missing(3)


def test_an_iapr_file_may_be_utf_8_or_have_a_byte_that_windows_does_not_know(tmp_path: Path) -> None:
    folder = layouts.iapr(tmp_path) / "annotations_complete_eng" / "00"
    text = (folder / "0.eng").read_text("cp1252")
    (folder / "0.eng").write_text(text, "utf-8-sig")
    (folder / "1.eng").write_bytes((folder / "1.eng").read_bytes().replace(b"Title 1", b"Title \x81"))
    found = read("iapr", tmp_path)
    assert found.captions[:2] == (("a café & 0 trees;",), ("Title \x81",))


def test_iapr_reads_descriptions_in_their_own_encoding_and_saiapr_labels(tmp_path: Path) -> None:
    found = read("iapr", layouts.iapr(tmp_path))
    assert found.keys == ("00/0", "00/1", "00/2", "01/3", "01/4")
    assert found.captions[0] == ("a café & 0 trees;",)
    assert found.captions[1] == ("Title 1",)
    assert found.label_names == ("sky", "tree")
    assert [labels_of(found, row) for row in (0, 1, 2)] == [["sky", "tree"], ["sky"], []]
    assert found.split is None


def test_an_iapr_annotation_cannot_name_a_file_outside_the_set(tmp_path: Path) -> None:
    layouts.iapr(tmp_path)
    layouts.write(tmp_path / "annotations_complete_eng" / "00" / "9.eng", "<IMAGE>../../etc/passwd</IMAGE>")
    with pytest.raises(InputError, match=r"9\.eng: IMAGE"):
        read("iapr", tmp_path)


def test_msrvtt_takes_evenly_spaced_frames_of_each_folder(tmp_path: Path) -> None:
    found = read("msrvtt", layouts.msrvtt(tmp_path))
    assert words(found) == ["train", "train", "val", "test"]
    assert found.captions[2] == ("clip 2 0", "clip 2 1")
    assert labels_of(found, 1) == ["category-10"]
    assert found.pictures.clips
    assert len(found.pictures.frames(0)) == 12
    assert len(read("msrvtt", tmp_path, frames=4).pictures.frames(0)) == 4


def test_a_caption_that_is_no_text_is_refused(tmp_path: Path) -> None:
    layouts.msrvtt(tmp_path, frames=1)
    whole = json.loads((tmp_path / "MSRVTT_data.json").read_text())
    whole["sentences"][3]["caption"] = None
    layouts.write(tmp_path / "MSRVTT_data.json", json.dumps(whole))
    with pytest.raises(InputError, match=r"MSRVTT_data\.json: found .TypeError: the caption None of .video1"):
        read("msrvtt", tmp_path)


@pytest.mark.parametrize("number", ["²", "9" * 5000, "-1"])
def test_numbers_of_lists_are_plain_ones(tmp_path: Path, number: str) -> None:
    layouts.mirflickr(tmp_path / "mir")
    layouts.write(tmp_path / "mir" / "mirflickr25k_annotations_v080" / "sea.txt", f"1\n{number}\n")
    with pytest.raises(InputError, match="numbers of images, one a line"):
        read("mirflickr", tmp_path / "mir")
    layouts.wikipedia(tmp_path / "wiki")
    layouts.write(tmp_path / "wiki" / "testset_txt_img_cat.list", f"a b {number}\n")
    with pytest.raises(InputError, match=r"testset_txt_img_cat\.list: line 1"):
        read("wikipedia", tmp_path / "wiki")


def test_msrvtt_in_two_files_is_one_set(tmp_path: Path) -> None:
    layouts.msrvtt(tmp_path, frames=1)
    whole = json.loads((tmp_path / "MSRVTT_data.json").read_text())
    for name, tests in (("train_val_videodatainfo.json", False), ("test_videodatainfo.json", True)):
        chosen = {"videos": [v for v in whole["videos"] if (v["split"] == "test") == tests]}
        layouts.write(tmp_path / name, json.dumps({**chosen, "sentences": whole["sentences"] if not tests else []}))
    (tmp_path / "MSRVTT_data.json").unlink()
    assert words(read("msrvtt", tmp_path)) == ["train", "train", "val", "test"]
    # Elsewhere, each in a folder of its archive's name.
    for name, inner in (("train_val", "train_val_annotation"), ("test", "test_videodatainfo")):
        (tmp_path / "notes" / inner).mkdir(parents=True)
        (tmp_path / f"{name}_videodatainfo.json").rename(tmp_path / "notes" / inner / f"{name}_videodatainfo.json")
    assert words(read("msrvtt", tmp_path, annotations=tmp_path / "notes")) == ["train", "train", "val", "test"]
    with pytest.raises(InputError, match=r"data\.annotations: found 'no annotation file'.* in .*frames"):
        read("msrvtt", tmp_path, annotations=tmp_path / "frames")


def test_half_a_video_is_named(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    path = tmp_path / "cut.mp4"
    generator = np.random.default_rng(0)
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 64
        for _ in range(30):
            noise = generator.integers(0, 256, (64, 64, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(noise, format="rgb24")))
        container.mux(stream.encode())
    assert len(pictures.video_frames(path, 12)) == 12
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
    with pytest.raises(InputError, match=r"cut\.mp4: found '\d+ of 30 frames'"):
        pictures.video_frames(path, 12)


def test_a_video_gives_twelve_frames_in_order_and_a_broken_one_is_named(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    layouts.msrvtt(tmp_path, frames=1)
    path = tmp_path / "TrainValVideo" / "video0.mp4"
    path.parent.mkdir()
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        for shade in range(30):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 8 * shade, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    found = read("msrvtt", tmp_path, images=tmp_path / "TrainValVideo")
    shades = [int(frame.mean()) for frame in found.pictures.frames(0)]
    assert len(shades) == 12
    assert shades == sorted(shades)
    assert shades[0] < 20
    assert shades[-1] > 210
    path.write_bytes(b"no video")
    with pytest.raises(InputError, match=r"video0\.mp4.*readable video"):
        found.pictures.frames(0)


def test_without_a_decoder_a_video_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts.msrvtt(tmp_path, frames=1)
    layouts.write(tmp_path / "videos" / "video0.mp4", "x")
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    found = read("msrvtt", tmp_path, images=tmp_path / "videos")
    with pytest.raises(InputError, match=r"package av missing.*\[video\]"):
        found.pictures.frames(0)


def test_mirflickr_keeps_items_with_a_common_tag_and_a_label_and_leaves_the_strict_labels_out(tmp_path: Path) -> None:
    found = read("mirflickr", layouts.mirflickr(tmp_path))
    assert found.keys == tuple(f"im{number}" for number in range(1, 8))
    assert found.bag is not None
    assert found.bag.tolist()[:2] == [[1, 0, 1], [0, 1, 0]]
    assert found.captions[0] == ("sky sea",)
    assert found.label_names == ("animals", "sea")
    assert [labels_of(found, row) for row in (0, 1, 4)] == [["sea"], ["animals"], ["sea"]]


@pytest.mark.parametrize(
    ("gone", "expected"),
    [
        ("mirflickr/meta/tags/*", r"meta/tags: found 'no tagsN\.txt with a common tag'"),
        ("mirflickr/doc/common_tags.txt", r"common_tags\.txt: found 'no tag'"),
        ("mirflickr25k_annotations_v080/[as]*", r"annotations_v080: found 'no label file'"),
    ],
)
def test_what_mirflickr_lacks_is_named(gone: str, expected: str, tmp_path: Path) -> None:
    layouts.mirflickr(tmp_path)
    for path in tmp_path.glob(gone):
        path.write_text("") if path.name == "common_tags.txt" else path.unlink()
    with pytest.raises(InputError, match=expected):
        read("mirflickr", tmp_path)


def test_nuswide_keeps_the_21_most_frequent_labels_and_the_items_that_have_one(tmp_path: Path) -> None:
    found = read("nuswide", layouts.nuswide(tmp_path))
    assert len(found.label_names) == 21
    assert "l22" not in found.label_names
    assert found.keys[0] == "actor/0001_1.jpg"
    assert len(found) == 8
    assert found.bag is not None
    assert found.bag.shape == (8, 1000)
    # Item 1 has a label but no tag: an empty bag, and no sentence.
    assert not found.bag[0].any()
    assert found.captions[0] == ()
    assert found.captions[1][0].startswith("word2 word11 ")


def test_nuswide_files_of_unequal_length_are_named(tmp_path: Path) -> None:
    layouts.nuswide(tmp_path)
    layouts.write(tmp_path / "Groundtruth" / "AllLabels" / "Labels_l03.txt", "0\n1\n")
    with pytest.raises(InputError, match=r"Labels_l03\.txt: found '2 lines', allowed: 9"):
        read("nuswide", tmp_path)
    layouts.write(tmp_path / "Groundtruth" / "AllLabels" / "Labels_l03.txt", "0\n2\n")
    with pytest.raises(InputError, match=r"Labels_l03\.txt: line 2: found '2', allowed: 0 or 1"):
        read("nuswide", tmp_path)
    layouts.write(tmp_path / "Groundtruth" / "AllLabels" / "Labels_l03.txt", "0\n01\n")
    with pytest.raises(InputError, match=r"line 2: found '2 digits', allowed: 1, each 0 or 1"):
        read("nuswide", tmp_path)


def test_a_list_of_nuswides_tags_that_is_too_short_is_named(tmp_path: Path) -> None:
    layouts.nuswide(tmp_path)
    layouts.write(tmp_path / "NUS_WID_Tags" / "TagList1k.txt", "\n".join(f"word{column}" for column in range(998)))
    with pytest.raises(InputError, match=r"TagList1k\.txt: found '998 tags', allowed: 1000, as AllTags1k\.txt"):
        read("nuswide", tmp_path)


def test_wikipedia_reads_its_lists_and_halves_the_test_list_into_validation_and_queries(tmp_path: Path) -> None:
    found = read("wikipedia", layouts.wikipedia(tmp_path))
    assert words(found) == ["train", "train", "val", "test", "test"]
    assert found.captions[1] == ("A & 1",)
    assert [labels_of(found, row) for row in range(5)] == [["art"], ["biology"], ["art"], ["sport"], ["warfare"]]
    assert len(found.label_names) == 10
    layouts.write(tmp_path / "testset_txt_img_cat.list", "a b 11\n")
    with pytest.raises(InputError, match=r"testset_txt_img_cat\.list: line 1"):
        read("wikipedia", tmp_path)


def test_pascal_takes_the_folder_as_the_class_and_lines_as_captions(tmp_path: Path) -> None:
    layouts.pascal(tmp_path)
    (tmp_path / "dataset" / "sofa" / "2008_000001.jpg").unlink()
    found = read("pascal", tmp_path)
    assert len(found) == 6
    assert found.captions[0] == ("One 0.", "Two 0.")
    assert found.label_names == ("cat", "sofa")
    assert [row for row in range(6) if found.pictures.missing(row)] == [found.keys.index("sofa/2008_000001")]


def test_pascal_takes_only_pictures_for_pictures(tmp_path: Path) -> None:
    layouts.pascal(tmp_path)
    layouts.write(tmp_path / "dataset" / "cat" / "2008_000000.jpg.md5", "x")
    layouts.write(tmp_path / "dataset" / "cat" / "2008_000000.txt", "x")
    layouts.write(tmp_path / "dataset" / "cat" / "2008_000000.xml", "x")
    found = read("pascal", tmp_path)
    assert found.pictures.frames(0)[0].shape == (16, 16, 3)
    assert len(found) == 6


# --- manifest -------------------------------------------------------------------------------------------------------

ROWS = [
    {"image": "a.png", "captions": ["one", "two"], "labels": ["x", "y"], "split": "train"},
    {"image": "in/b.png", "caption": "three", "labels": "y", "split": "test"},
]


def test_a_manifest_in_jsonl_starts_its_paths_at_its_own_folder(tmp_path: Path) -> None:
    found = read("manifest", layouts.manifest(tmp_path, ROWS))
    assert found.keys == ("a.png", "in/b.png")
    assert found.captions == (("one", "two"), ("three",))
    assert [labels_of(found, row) for row in (0, 1)] == [["x", "y"], ["y"]]
    assert words(found) == ["train", "test"]
    assert found.pictures.frames(1)[0].shape == (16, 16, 3)


def test_a_manifest_in_csv_is_the_same_set(tmp_path: Path) -> None:
    whole = read("manifest", layouts.manifest(tmp_path, ROWS))
    path = layouts.write(
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
        ("list.jsonl", '{"caption": "a"}', r"line 1: image"),
        ("list.jsonl", '{"image": "a", "captions": 3}', r"line 1: captions"),
        ("list.jsonl", '{"image": "a"}\n{"image": "a"}', "line 2: found \"'a' again, as in line 1\""),
        ("list.jsonl", '{"image": "in/a"}\n\n{"image": " ./in//a"}', "line 3: found \"'in/a' again, as in line 1\""),
        ("list.jsonl", '{"image": "a", "split": "train"}\n\n{"image": "b"}', "line 3: split: found 'nothing'"),
        ("list.jsonl", '{"image": "a", "split": "dev"}', "line 1: split: found 'dev', allowed: train, val"),
        ("list.csv", "image,caption,labels\na,b,x\nc,d\n", r"line 3: found '2 fields', allowed: as many fields"),
        ("list.jsonl", "7", "line 1: found 'int'"),
        ("list.jsonl", '{"image": "a", "caption": "x\u2028y"}', "1 items"),
        ("list.csv", "image,caption\na,b,c\n", r"line 2.*as many fields"),
        ("list.csv", "picture\na\n", "line 1: found 'picture'"),
        ("list.csv", "caption\na\n", "line 1: found 'columns caption', allowed: a column image"),
        ("list.txt", "", r"\.csv or \.jsonl"),
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
def test_what_is_wrong_in_a_manifest_is_named_by_line(name: str, content: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=expected) as caught:
        read("manifest", layouts.write(tmp_path / name, content))
    str(caught.value).encode()


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
def test_several_fields_of_captions_are_joined(name: str, content: str, tmp_path: Path) -> None:
    found = read("manifest", layouts.write(tmp_path / name, content))
    assert found.captions == (("one", "two", "three"), ("four",))


def test_a_mark_of_windows_before_jsonl_and_a_key_of_zero_are_read(tmp_path: Path) -> None:
    content = '{"image": "a", "key": 0}\n{"image": "b", "key": ""}\n'
    assert read("manifest", layouts.write(tmp_path / "list.jsonl", content, "utf-8-sig")).keys == ("0", "b")


def test_a_mark_of_windows_before_csv_is_passed_over_and_what_is_no_text_has_its_line(tmp_path: Path) -> None:
    path = layouts.write(tmp_path / "list.csv", "image,caption\na,one\nb,two\n", "utf-8-sig")
    assert read("manifest", path).captions == (("one",), ("two",))
    path.write_bytes(b"image,caption\na,one\nb,tw\xff\n")
    with pytest.raises(InputError, match=r"list\.csv: line 3: .*utf-8 text"):
        read("manifest", path)


def test_a_folder_of_frames_in_a_manifest_is_a_video(tmp_path: Path) -> None:
    layouts.msrvtt(tmp_path)
    rows = [f'{{"image": "frames/video{row}", "caption": "x"}}\n' for row in range(4)]
    path = layouts.write(tmp_path / "list.jsonl", "".join(rows))
    found = read("manifest", path)
    assert found.pictures.clips
    assert len(found.pictures.frames(1)) == 12
    once = read("manifest", path, frames=1)
    assert len(once.pictures.frames(1)) == 1
    # A folder above the manifest holds many things, but no frames.
    layouts.write(path, rows[0] + '{"image": "frames/..", "caption": "x"}\n')
    with pytest.raises(InputError, match=r"line 2: image: found 'frames/\.\.'"):
        read("manifest", path)


# --- splits ---------------------------------------------------------------------------------------------------------


def test_a_drawn_split_has_the_sizes_asked_for_and_the_rest_is_database() -> None:
    split = draw_parts(100, Draw(10, 5, 30), 0)
    assert np.bincount(split, minlength=5).tolist() == [30, 5, 10, 0, 55]
    assert (split == draw_parts(100, Draw(10, 5, 30), 0)).all()
    assert (split != draw_parts(100, Draw(10, 5, 30), 1)).any()
    # More training items do not move the queries.
    assert (np.flatnonzero(draw_parts(100, Draw(10, 5, 40), 0) == 2) == np.flatnonzero(split == 2)).all()


@pytest.mark.parametrize("sizes", [Draw(100), Draw(10, 90), Draw(10, 0, 91)])
def test_a_set_too_small_for_the_numbers_says_so(sizes: Draw) -> None:
    with pytest.raises(InputError, match=r"data\.queries.*the 100 items"):
        draw_parts(100, sizes, 0)


def test_the_scenarios_numbers_replace_a_sets_own_split() -> None:
    own = np.array([0] * 8 + [2, 2], dtype=np.uint8)
    plain = Data(name="flickr8k", path=Path("x"))
    assert (split_of(own, 10, plain, Draw()) == own).all()
    drawn = split_of(own, 10, plain.model_copy(update={"queries": 3, "train": 2}), Draw())
    assert np.bincount(drawn, minlength=5).tolist() == [2, 0, 3, 0, 5]
    with pytest.raises(InputError, match=r"data\.queries"):
        split_of(own, 10, plain.model_copy(update={"train": 2}), Draw())
    assert np.bincount(split_of(None, 10, plain, Draw())).tolist() == [8, 1, 1]
    assert np.bincount(split_of(None, 10, plain, Draw(4)), minlength=5).tolist() == [6, 0, 4, 0, 0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"name": "flicker8k", "path": "x"}, "openmoji, flickr8k, flickr30k"),
        ({"name": "flicker8k", "path": "x"}, "did you mean flickr8k"),
        ({"name": "coco"}, "data.path: found 'nothing'"),
        ({"name": "openmoji", "frames": 3}, "data.frames: .*no such key with data.name openmoji"),
        ({"name": "features", "path": "x", "train": 3}, "data.train: .*no such key with data.name features"),
        ({"name": "manifest", "path": "x.csv", "annotations": "y"}, "data.annotations: .*data.name manifest"),
    ],
)
def test_a_scenario_names_a_known_set_and_only_its_own_options(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        catalogue.check(Data.model_validate(options))


@pytest.mark.parametrize("name", ["lite", "features"])
def test_weights_are_not_for_a_backbone_that_takes_none(name: str) -> None:
    with pytest.raises(ValueError, match=rf"backbone\.pretrained is not for backbone\.name {name}"):
        Backbone.model_validate({"name": name, "pretrained": "w.pt"})


# --- documents ------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parent.parent


def test_the_document_has_a_layout_and_a_snippet_for_every_set() -> None:
    text = (ROOT / "docs" / "reference" / "data_sets.md").read_text()
    for name in SETS:
        assert f"\n### {name}\n" in text, name
        path = "}" if name == "openmoji" else ", path:"
        assert f"data: {{name: {name}{path}" in text, name


def test_the_data_set_of_contributing_is_a_data_set(tmp_path: Path) -> None:
    lines = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    start = lines.index("    def read_mine(data: Data) -> RawSet:")
    code = "\n".join(line[4:] for line in lines[start : lines.index("", start)])
    from fedmq.data import raw_set
    from fedmq.encoders.images import Files

    names = {**vars(raw_set), "Files": Files, "Data": Data}
    exec(code, names)
    layouts.photo(tmp_path / "photos" / "a.png", 1)
    entries = [{"file": "a.png", "class": "x", "text": "one"}, {"file": "b.png", "class": "y", "text": "two"}]
    layouts.write(tmp_path / "list.json", json.dumps(entries))
    found = names["read_mine"](Data(name="manifest", path=tmp_path))
    assert found.captions == (("one",), ("two",))
    assert found.label_names == ("x", "y")
    assert found.pictures.missing(1)


@pytest.mark.slow
def test_reading_a_scenario_brings_no_torch() -> None:
    code = (
        "import sys; from fedmq.config.scenario import Data; Data(name='coco', path='x');"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("name", ["iapr", "pascal", "mirflickr", "msrvtt"])
def test_what_a_mac_leaves_beside_the_files_is_no_part_of_a_set(name: str, tmp_path: Path) -> None:
    whole = read(name, getattr(layouts, name)(tmp_path))
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        path.with_name(f"._{path.name}").write_bytes(b"\x00\x05\x16\x07Mac OS X\xff")
    (tmp_path / "__MACOSX").mkdir()
    found = read(name, tmp_path)
    assert found.keys == whole.keys
    assert found.label_names == whole.label_names
    assert found.captions == whole.captions
    assert np.array_equal(found.pictures.frames(0), whole.pictures.frames(0))
