"""Folders and Parquet files made to exhaust memory, or to read files outside of the data set."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fedmq.data.readers import parquet
from fedmq.encoders import images
from fedmq.errors import InputError
from fedmq.storage.regular_files import check_run_files
from tests import data_set_folders
from tests.read_data_sets import read


def table(path: Path, images: list[Any], captions: list[Any], form: str = "parquet") -> Path:
    arrow = pytest.importorskip("pyarrow")
    made = arrow.table({"image": images, "caption": captions})
    file = path / f"train.{form}"
    if form == "arrow":
        with arrow.ipc.new_stream(str(file), made.schema) as writer:
            writer.write_table(made)
    else:
        pytest.importorskip("pyarrow.parquet").write_table(made, file, compression="zstd")
    return file


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_the_captions_of_a_row_are_bounded(form: str, tmp_path: Path) -> None:
    file = table(tmp_path, [b"picture"] * 2, [["a" * (1 << 19), "short"], ["b" * (1 << 20), "more"]], form)
    with pytest.raises(
        InputError, match=r"caption\[1\]: found '1,048,580 bytes', allowed: captions of at most 1,048,576"
    ):
        read("parquet", file)


def test_a_small_file_that_repeats_a_large_caption_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "MAX_MORE_TEXT", 1 << 20)
    file = table(tmp_path, [b"picture"] * 60, ["a" * (1 << 16)] * 60)
    assert file.stat().st_size < 5_000
    with pytest.raises(InputError, match=r"caption: found 'more than 1,294,336 decoded bytes in a row group'"):
        read("parquet", file)


def test_a_row_group_of_pictures_is_bounded_by_what_it_decodes_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "MAX_GROUP", 1 << 20)
    found = read("parquet", table(tmp_path, [b"p" * (1 << 16)] * 60, ["text"] * 60))
    with pytest.raises(InputError, match=r"image: found 'more than 1,048,576 decoded bytes in a row group'"):
        found.pictures.frames(0)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize("path", ["/etc/passwd", "../1.png", "a/../../1.png"])
def test_a_row_without_bytes_may_not_name_a_file_outside_of_the_folder(form: str, path: str, tmp_path: Path) -> None:
    images = [{"bytes": b"picture", "path": "/home/someone/0.png"}] * 20 + [{"bytes": None, "path": path}]
    with pytest.raises(InputError, match=r"image\[20\].path: found .*, allowed: the path of a picture in the folder"):
        read("parquet", table(tmp_path, images, ["text"] * 21, form))


def test_a_link_to_a_folder_outside_is_refused_and_one_to_a_folder_or_file_is_not(tmp_path: Path) -> None:
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
    with pytest.raises(InputError, match=r"in/up: found 'a link to \.\./\.\.', allowed: links to folders in"):
        read("folder", photos)


def test_a_link_out_of_a_folder_of_tables_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    folder.mkdir()
    table(folder, [b"picture"] * 2, ["a", "b"])
    (folder / "up").symlink_to("..")
    with pytest.raises(InputError, match=r"up: found 'a link to \.\.'"):
        read("parquet", folder)


@pytest.mark.parametrize("name", ["images.mat", "images.h5", "images.npz"])
def test_a_pipe_in_place_of_arrays_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match="found 'a FIFO'"):
        read("fashionvc", tmp_path)


def test_a_pipe_in_place_of_tags_or_of_a_video_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    folder = data_set_folders.nuswide(tmp_path / "nuswide")
    tags = folder / "NUS_WID_Tags" / "AllTags1k.txt"
    tags.unlink()
    os.mkfifo(tags)
    with pytest.raises(InputError, match="found 'a FIFO'"):
        read("nuswide", folder)
    pytest.importorskip("av")
    os.mkfifo(tmp_path / "clip.mp4")
    with pytest.raises(InputError, match="found 'a FIFO'"):
        images.video_frames(tmp_path / "clip.mp4", 2)


def test_a_link_to_itself_is_an_error_of_one_line(tmp_path: Path) -> None:
    folder = data_set_folders.coco(tmp_path / "coco")
    instances = folder / "annotations" / "instances_val2014.json"
    instances.unlink()
    instances.symlink_to(instances.name)
    with pytest.raises(InputError, match=r"instances_val2014\.json: found 'Too many levels"):
        read("coco", folder)
    (tmp_path / "summary.json").symlink_to("summary.json")
    with pytest.raises(InputError, match=r"summary\.json: found 'Too many levels"):
        check_run_files(tmp_path)
