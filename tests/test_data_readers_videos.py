"""Video data sets: frames in folders, video files, and their errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedmq.encoders import images
from fedmq.errors import InputError
from tests import data_set_folders
from tests.read_data_sets import labels_of, read, words

pytest.importorskip("PIL")


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


def test_a_truncated_video_is_refused_by_name(tmp_path: Path) -> None:
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
    assert len(images.video_frames(path, 12)) == 12
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
    with pytest.raises(InputError, match=r"cut\.mp4: found '\d+ of 30 frames'"):
        images.video_frames(path, 12)


def test_a_video_yields_twelve_frames_in_order_and_a_broken_one_is_refused_by_name(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    data_set_folders.msrvtt(tmp_path, frames=1)
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
    shades = [int(frame.mean()) for frame in found.images.frames(0)]
    assert len(shades) == 12
    assert shades == sorted(shades)
    assert shades[0] < 20
    assert shades[-1] > 210
    path.write_bytes(b"no video")
    with pytest.raises(InputError, match=r"video0\.mp4.*readable video"):
        found.images.frames(0)


def test_without_a_decoder_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(InputError, match=r"package av missing.*\[video\]"):
        images.frames_of("video0.mp4", 2)
