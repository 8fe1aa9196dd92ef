"""Every data set in the layout in which it is distributed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedmq.data.catalogue import SETS
from fedmq.encoders.images import decode
from fedmq.errors import InputError
from tests import data_set_folders
from tests.read_data_sets import ROWS, labels_of, read, words

pytest.importorskip("PIL")


@pytest.mark.parametrize("name", ["flickr8k", "flickr30k"])
def test_karpathys_json_yields_captions_and_splits_in_its_order(name: str, tmp_path: Path) -> None:
    found = read(name, data_set_folders.flickr(tmp_path, name))
    assert found.keys == tuple(f"{row}.jpg" for row in range(6))
    assert words(found) == list(data_set_folders.SPLITS)
    assert [len(own) for own in found.captions] == [1, 2, 3, 1, 2, 3]
    assert found.captions[1][1] == "picture 1 as number 1 sees it"
    assert found.labels is None
    assert found.images.frames(0)[0].shape == (16, 20, 3)


def test_annotations_and_images_may_be_in_other_folders(tmp_path: Path) -> None:
    data_set_folders.flickr(tmp_path / "a")
    (tmp_path / "a" / "images").rename(tmp_path / "photos")
    (tmp_path / "a" / "dataset_flickr8k.json").rename(tmp_path / "k.json")
    with pytest.raises(InputError, match=r"data\.annotations.*dataset_flickr8k\.json"):
        read("flickr8k", tmp_path / "a")
    found = read("flickr8k", tmp_path / "a", annotations=tmp_path / "k.json", images=tmp_path / "photos")
    assert not any(found.images.missing(row) for row in range(len(found)))


def test_flickr8ks_release_yields_the_photos_of_its_lists(tmp_path: Path) -> None:
    found = read("flickr8k", data_set_folders.flickr8k_release(tmp_path, ["test", "val", "train", "train"]))
    assert found.keys == ("102_00000002.jpg", "103_00000003.jpg", "101_00000001.jpg", "100_00000000.jpg")
    assert words(found) == ["train", "train", "val", "test"]
    assert found.captions[2] == tuple(f"Photo 1 as number {number} sees it ." for number in range(5))
    assert all(len(own) == 5 for own in found.captions)
    assert not any(found.images.missing(row) for row in range(len(found)))
    assert np.array_equal(found.images.frames(0)[0], decode(tmp_path / "Flicker8k_Dataset" / found.keys[0]))
    # The folder's other name; Karpathy's JSON takes precedence where it exists.
    (tmp_path / "Flicker8k_Dataset").rename(tmp_path / "Flickr8k_Dataset")
    assert not read("flickr8k", tmp_path).images.missing(0)
    data_set_folders.flickr(tmp_path)
    assert read("flickr8k", tmp_path).keys[0] == "0.jpg"


def test_parts_of_flickr8ks_release_may_be_in_other_folders(tmp_path: Path) -> None:
    whole = read("flickr8k", data_set_folders.flickr8k_release(tmp_path / "set"))
    (tmp_path / "set" / "Flickr8k_text").rename(tmp_path / "notes")
    with pytest.raises(InputError, match=r"data\.annotations.*dataset_flickr8k\.json or .*Flickr8k\.token\.txt"):
        read("flickr8k", tmp_path / "set")
    for notes in (tmp_path / "notes", tmp_path / "notes" / "Flickr8k.token.txt"):
        found = read("flickr8k", tmp_path / "set", annotations=notes)
        assert (found.keys, found.captions) == (whole.keys, whole.captions)
    (tmp_path / "set" / "Flicker8k_Dataset").rename(tmp_path / "photos")
    found = read("flickr8k", tmp_path / "set", annotations=tmp_path / "notes", images=tmp_path / "photos")
    assert not any(found.images.missing(row) for row in range(len(found)))
    # The three lists may be in the data set's root folder.
    for path in (tmp_path / "notes").glob("Flickr_8k.*"):
        path.rename(tmp_path / "set" / path.name)
    assert read("flickr8k", tmp_path / "set", annotations=tmp_path / "notes", images=tmp_path).keys == whole.keys


def test_wikipedias_lists_and_texts_may_be_in_other_folders(tmp_path: Path) -> None:
    whole = read("wikipedia", data_set_folders.wikipedia(tmp_path / "set"))
    notes = tmp_path / "notes"
    notes.mkdir()
    for name in ("trainset_txt_img_cat.list", "testset_txt_img_cat.list"):
        (tmp_path / "set" / name).rename(notes / name)
    for _ in range(2):
        found = read("wikipedia", tmp_path / "set", annotations=notes)
        assert (found.keys, found.captions) == (whole.keys, whole.captions)
        assert not any(found.images.missing(row) for row in range(len(found)))
        if not (notes / "texts").exists():
            (tmp_path / "set" / "texts").rename(notes / "texts")
    with pytest.raises(InputError, match=r"elsewhere/trainset_txt_img_cat\.list.*no such file"):
        read("wikipedia", tmp_path / "set", annotations=tmp_path / "elsewhere")


@pytest.mark.parametrize("inner", ["Groundtruth/AllLabels", "AllLabels", "."])
def test_nuswides_labels_may_be_in_another_folder(inner: str, tmp_path: Path) -> None:
    whole = read("nuswide", data_set_folders.nuswide(tmp_path / "set"))
    (tmp_path / "notes" / inner).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "set" / "Groundtruth" / "AllLabels").rename(tmp_path / "notes" / inner)
    with pytest.raises(InputError, match=r"data\.annotations.*AllLabels"):
        read("nuswide", tmp_path / "set")
    found = read("nuswide", tmp_path / "set", annotations=tmp_path / "notes")
    assert found.label_names == whole.label_names
    assert np.array_equal(found.labels, whole.labels)  # type: ignore[arg-type]


def test_iaprs_images_may_be_given_as_the_numbered_folders_or_their_parent(tmp_path: Path) -> None:
    data_set_folders.iapr(tmp_path / "set")
    (tmp_path / "photos").mkdir()
    (tmp_path / "set" / "images").rename(tmp_path / "photos" / "images")
    for images in (tmp_path / "photos" / "images", tmp_path / "photos"):
        found = read("iapr", tmp_path / "set", images=images)
        assert not any(found.images.missing(row) for row in range(len(found)))
    (tmp_path / "photos" / "images" / "00" / "1.jpg").unlink()
    found = read("iapr", tmp_path / "set", images=tmp_path / "photos" / "images")
    assert [row for row in range(len(found)) if found.images.missing(row)] == [1]
    assert found.images.name(1) == str(tmp_path / "photos" / "images" / "00" / "1.jpg")


def test_cocos_own_captions_are_read_and_its_val_part_is_the_test_split(tmp_path: Path) -> None:
    for part in ("train2014", "val2014"):
        images = [{"id": number, "file_name": f"{part}_{number}.jpg"} for number in (1, 2, 3)]
        said = [{"image_id": number % 3 + 1, "caption": f"{part} seen {number}"} for number in range(6)]
        for image in images if part == "val2014" else []:
            data_set_folders.photo(tmp_path / part / str(image["file_name"]), 1)
        content = json.dumps({"images": images, "annotations": said, "licenses": []})
        data_set_folders.write(tmp_path / "annotations" / f"captions_{part}.json", content)
    both = read("coco", tmp_path)
    assert words(both) == ["train"] * 3 + ["test"] * 3
    one = read("coco", tmp_path, annotations=tmp_path / "annotations" / "captions_val2014.json")
    assert one.split is None and one.split_remark.startswith("val2014 looks like a split")
    assert one.captions[0] == ("val2014 seen 0", "val2014 seen 3") and not one.images.missing(0)


def test_coco_trains_on_restval_and_takes_its_labels_from_the_instance_annotations(tmp_path: Path) -> None:
    found = read("coco", data_set_folders.coco(tmp_path))
    assert words(found) == ["train", "train", "val", "test", "test"]
    assert found.label_names == ("dog", "person")
    assert [labels_of(found, row) for row in range(5)] == [["dog"], ["dog", "person"], [], ["person"], []]
    assert found.images.frames(1)[0].shape == (16, 16, 3)


def test_coco_finds_its_labels_next_to_annotations_in_another_folder(tmp_path: Path) -> None:
    data_set_folders.coco(tmp_path / "set")
    (tmp_path / "notes").mkdir()
    (tmp_path / "set" / "dataset_coco.json").rename(tmp_path / "notes" / "dataset_coco.json")
    (tmp_path / "set" / "annotations").rename(tmp_path / "notes" / "annotations")
    found = read("coco", tmp_path / "set", annotations=tmp_path / "notes" / "dataset_coco.json")
    assert found.label_names == ("dog", "person")


def test_items_without_a_label_are_dropped_if_the_scenario_says_so(tmp_path: Path) -> None:
    found = read("coco", data_set_folders.coco(tmp_path), labelled=True)
    assert [labels_of(found, row) for row in range(len(found))] == [["dog"], ["dog", "person"], ["person"]]
    assert words(found) == ["train", "train", "test"]
    with pytest.raises(InputError, match=r"data\.labelled.*0 items with a label"):
        read("flickr8k", data_set_folders.flickr(tmp_path), labelled=True)


def test_only_the_first_captions_are_kept_if_the_scenario_says_so(tmp_path: Path) -> None:
    folder = data_set_folders.flickr(tmp_path)
    whole, one = read("flickr8k", folder), read("flickr8k", folder, captions=1)
    assert max(map(len, whole.captions)) > 1
    assert one.captions == tuple(own[:1] for own in whole.captions)
    assert read("flickr8k", folder, captions=99).captions == whole.captions


def test_symlinked_folders_are_followed_and_link_cycles_end(tmp_path: Path) -> None:
    data_set_folders.pascal(tmp_path / "elsewhere")
    for name in ("dataset", "sentence"):
        (tmp_path / "set" / name).mkdir(parents=True)
        for inner in ("cat", "sofa"):
            (tmp_path / "set" / name / inner).symlink_to(tmp_path / "elsewhere" / name / inner)
    (tmp_path / "elsewhere" / "dataset" / "cat" / "again").symlink_to(tmp_path / "set" / "dataset")
    found = read("pascal", tmp_path / "set")
    assert found.keys == tuple(f"{('cat', 'sofa')[row % 2]}/2008_{row:06d}" for row in (0, 2, 4, 1, 3, 5))
    (tmp_path / "elsewhere" / "dataset" / "a-sofa").symlink_to(tmp_path / "elsewhere" / "dataset" / "sofa")
    assert read("pascal", tmp_path / "elsewhere").keys == found.keys
    data_set_folders.iapr(tmp_path / "iapr")
    for name in ("annotations_complete_eng", "saiapr_tc-12"):
        (tmp_path / "iapr" / name / "00").rename(tmp_path / f"{name}-00")
        (tmp_path / "iapr" / name / "00").symlink_to(tmp_path / f"{name}-00")
    assert len(read("iapr", tmp_path / "iapr")) == 5
    assert read("iapr", tmp_path / "iapr").label_names == ("sky", "tree")
    data_set_folders.msrvtt(tmp_path / "videos")
    (tmp_path / "videos" / "frames").rename(tmp_path / "frames")
    (tmp_path / "videos" / "frames").symlink_to(tmp_path / "frames")
    (tmp_path / "frames" / "video0" / "up").symlink_to(tmp_path / "videos")
    assert len(read("msrvtt", tmp_path / "videos").images.frames(3)) == 12


def test_a_file_name_too_long_for_the_disk_counts_as_a_missing_image(tmp_path: Path) -> None:
    path = data_set_folders.manifest(tmp_path, ROWS)
    data_set_folders.write(path, path.read_text().replace("in/b.png", "a" * 300 + ".png"))
    assert [read("manifest", path).images.missing(row) for row in (0, 1)] == [False, True]
    data_set_folders.wikipedia(tmp_path / "wiki")
    listed = tmp_path / "wiki" / "testset_txt_img_cat.list"
    data_set_folders.write(listed, listed.read_text().replace("img3", "i" * 300))
    assert read("wikipedia", tmp_path / "wiki").images.missing(3)


def test_an_iapr_file_may_be_utf_8_or_contain_a_byte_undefined_in_windows_1252(tmp_path: Path) -> None:
    folder = data_set_folders.iapr(tmp_path) / "annotations_complete_eng" / "00"
    text = (folder / "0.eng").read_text("cp1252")
    (folder / "0.eng").write_text(text, "utf-8-sig")
    (folder / "1.eng").write_bytes((folder / "1.eng").read_bytes().replace(b"Title 1", b"Title \x81"))
    found = read("iapr", tmp_path)
    assert found.captions[:2] == (("a café & 0 trees;",), ("Title \x81",))


def test_iapr_descriptions_are_read_in_their_own_encoding_with_saiapr_labels(tmp_path: Path) -> None:
    found = read("iapr", data_set_folders.iapr(tmp_path))
    assert found.keys == ("00/0", "00/1", "00/2", "01/3", "01/4")
    assert found.captions[0] == ("a café & 0 trees;",)
    assert found.captions[1] == ("Title 1",)
    assert found.label_names == ("sky", "tree")
    assert [labels_of(found, row) for row in (0, 1, 2)] == [["sky", "tree"], ["sky"], []]
    assert found.split is None


def test_mirflickr_keeps_items_with_a_common_tag_and_a_label_and_ignores_strict_labels(tmp_path: Path) -> None:
    found = read("mirflickr", data_set_folders.mirflickr(tmp_path))
    assert found.keys == tuple(f"im{number}" for number in range(1, 8))
    assert found.bag is not None
    assert found.bag.tolist()[:2] == [[1, 0, 1], [0, 1, 0]]
    assert found.captions[0] == ("sky sea",)
    assert found.label_names == ("animals", "sea")
    assert [labels_of(found, row) for row in (0, 1, 4)] == [["sea"], ["animals"], ["sea"]]


def test_nuswide_keeps_the_21_most_frequent_labels_and_items_with_at_least_one(tmp_path: Path) -> None:
    found = read("nuswide", data_set_folders.nuswide(tmp_path))
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


def test_wikipedias_test_list_is_halved_into_validation_and_queries(tmp_path: Path) -> None:
    found = read("wikipedia", data_set_folders.wikipedia(tmp_path))
    assert words(found) == ["train", "train", "val", "test", "test"]
    assert found.captions[1] == ("A & 1",)
    assert [labels_of(found, row) for row in range(5)] == [["art"], ["biology"], ["art"], ["sport"], ["warfare"]]
    assert len(found.label_names) == 10


def test_pascal_reads_the_folder_as_the_class_and_lines_as_captions(tmp_path: Path) -> None:
    data_set_folders.pascal(tmp_path)
    for ending in ("jpg.md5", "txt", "xml"):
        data_set_folders.write(tmp_path / "dataset" / "cat" / f"2008_000000.{ending}", "no image")
    (tmp_path / "dataset" / "sofa" / "2008_000001.jpg").unlink()
    found = read("pascal", tmp_path)
    assert len(found) == 6
    assert found.images.frames(0)[0].shape == (16, 16, 3)
    assert found.captions[0] == ("One 0.", "Two 0.")
    assert found.label_names == ("cat", "sofa")
    assert [row for row in range(6) if found.images.missing(row)] == [found.keys.index("sofa/2008_000001")]


ROOT = Path(__file__).parent.parent


def test_the_reference_page_has_a_layout_and_a_snippet_for_every_set() -> None:
    text = (ROOT / "docs" / "reference" / "data_sets.md").read_text()
    for name in SETS:
        assert f"\n### {name}\n" in text, name
        path = "}" if SETS[name].packaged else ", path:"
        assert f"data: {{name: {name}{path}" in text, name


@pytest.mark.parametrize("name", ["iapr", "pascal", "mirflickr", "msrvtt"])
def test_macos_metadata_files_are_not_part_of_a_data_set(name: str, tmp_path: Path) -> None:
    whole = read(name, getattr(data_set_folders, name)(tmp_path))
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        path.with_name(f"._{path.name}").write_bytes(b"\x00\x05\x16\x07Mac OS X\xff")
    (tmp_path / "__MACOSX").mkdir()
    found = read(name, tmp_path)
    assert found.keys == whole.keys
    assert found.label_names == whole.label_names
    assert found.captions == whole.captions
    assert np.array_equal(found.images.frames(0), whole.images.frames(0))


# --- videos ---------------------------------------------------------------------------------------------------------


def test_msrvtts_complete_file_takes_precedence_over_its_parts_in_any_folder(tmp_path: Path) -> None:
    data_set_folders.msrvtt(tmp_path)
    whole = json.loads((tmp_path / "MSRVTT_data.json").read_text())
    assert len(whole["videos"]) > 2
    (tmp_path / "annotation").mkdir()
    (tmp_path / "MSRVTT_data.json").rename(tmp_path / "annotation" / "MSRVTT_data.json")
    part = {"videos": whole["videos"][:2], "sentences": whole["sentences"]}
    (tmp_path / "train_val_videodatainfo.json").write_text(json.dumps(part))
    assert len(read("msrvtt", tmp_path)) == len(whole["videos"])
    (tmp_path / "annotation" / "MSRVTT_data.json").rename(tmp_path / "annotation" / "train_val_videodatainfo.json")
    assert len(read("msrvtt", tmp_path)) == 2


def test_msrvtt_takes_evenly_spaced_frames_of_each_folder(tmp_path: Path) -> None:
    found = read("msrvtt", data_set_folders.msrvtt(tmp_path))
    assert words(found) == ["train", "train", "val", "test"]
    assert found.captions[2] == ("clip 2 0", "clip 2 1")
    assert labels_of(found, 1) == ["category-10"]
    assert found.images.clips
    assert len(found.images.frames(0)) == 12
    assert len(read("msrvtt", tmp_path, frames=4).images.frames(0)) == 4


def test_msrvtt_in_two_files_is_read_as_one_data_set(tmp_path: Path) -> None:
    data_set_folders.msrvtt(tmp_path, frames=1)
    whole = json.loads((tmp_path / "MSRVTT_data.json").read_text())
    for name, tests in (("train_val_videodatainfo.json", False), ("test_videodatainfo.json", True)):
        chosen = {"videos": [v for v in whole["videos"] if (v["split"] == "test") == tests]}
        data_set_folders.write(
            tmp_path / name, json.dumps({**chosen, "sentences": whole["sentences"] if not tests else []})
        )
    (tmp_path / "MSRVTT_data.json").unlink()
    assert words(read("msrvtt", tmp_path)) == ["train", "train", "val", "test"]
    # In other folders, each named after its archive.
    for name, inner in (("train_val", "train_val_annotation"), ("test", "test_videodatainfo")):
        (tmp_path / "notes" / inner).mkdir(parents=True)
        (tmp_path / f"{name}_videodatainfo.json").rename(tmp_path / "notes" / inner / f"{name}_videodatainfo.json")
    assert words(read("msrvtt", tmp_path, annotations=tmp_path / "notes")) == ["train", "train", "val", "test"]
    with pytest.raises(InputError, match=r"data\.annotations: found 'no annotation file'.* in .*frames"):
        read("msrvtt", tmp_path, annotations=tmp_path / "frames")


def test_a_video_yields_twelve_frames_in_order(tmp_path: Path) -> None:
    data_set_folders.msrvtt(tmp_path, frames=1)
    (tmp_path / "TrainValVideo").mkdir()
    frames = [np.full((32, 32, 3), 8 * shade, np.uint8) for shade in range(30)]
    data_set_folders.video(tmp_path / "TrainValVideo" / "video0.mp4", frames)
    found = read("msrvtt", tmp_path, images=tmp_path / "TrainValVideo")
    shades = [int(frame.mean()) for frame in found.images.frames(0)]
    assert len(shades) == 12
    assert shades == sorted(shades)
    assert shades[0] < 20
    assert shades[-1] > 210
