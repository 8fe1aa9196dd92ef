"""Folders and Parquet files made to exhaust memory, or to read files outside of the data set."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fedmq.encoders import images
from fedmq.errors import InputError
from fedmq.storage import quarantine
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


def test_a_small_table_that_repeats_a_large_value_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "MEMORY", 1 << 28)
    monkeypatch.setattr(quarantine, "MEMORY_PER_BYTE", 0)
    with pytest.raises(InputError, match=r"train\."):
        read("parquet", table(tmp_path, [b"picture"] * 60, ["a" * (1 << 24)] * 60))
    found = read("parquet", table(tmp_path, [b"p" * (1 << 24)] * 60, ["text"] * 60))
    with pytest.raises(InputError, match=r"train\."):
        found.images.frames(0)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_row_without_bytes_that_names_a_file_is_refused_when_its_image_is_read(form: str, tmp_path: Path) -> None:
    images = [{"bytes": b"picture", "path": "0.png"}] * 20 + [{"bytes": None, "path": "/etc/passwd"}]
    found = read("parquet", table(tmp_path, images, ["text"] * 21, form))
    with pytest.raises(InputError, match=r"image\[20\]: found 'no image'"):
        found.images.frames(20)


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
