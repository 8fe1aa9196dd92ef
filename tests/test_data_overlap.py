"""Overlap between sites and between silos: found from keyed digests, or in the data of a simulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from fedmq.data.overlap import OverlapFile
from fedmq.storage.json_files import read_json
from tests.command_line import printed, refused


def items(seed: int, count: int = 20) -> dict[str, Any]:
    """Items of a site, of which every fourth is held out."""
    drawn = np.random.default_rng(seed).normal(size=(2, count, 6)).astype(np.float32)
    split = np.where(np.arange(count) % 4 == 0, "test", "train")
    return {
        "image": drawn[0],
        "text": drawn[1],
        "split": split,
        "keys": np.array([f"{seed}-{at}" for at in range(count)]),
    }


def secret(folder: Path, text: str = "4a" * 32) -> Path:
    path = folder / f"{len(text)}-{text[:2]}.key"
    path.write_text(f"{text}\n")
    path.chmod(0o600)
    return path


def site(folder: Path, name: str, data: dict[str, object], **keys: object) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"name": name, "data": data, **keys}))
    return path


def fingerprint(folder: Path, file: Path, key: Path | None = None) -> Path:
    out = folder / f"{file.stem}.overlap.json"
    printed("data", "fingerprint", file, "--key", key or secret(folder), "--out", out)
    return out


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Files of two sites: training items 1 and 2 of the first are test items 0 and 4 of the second, one with another
    image; and training item 3 is training item 5 there.
    """
    one, other = items(1), items(2)
    for here, there in ((1, 0), (2, 4), (3, 5)):
        other["image"][there], other["text"][there] = one["image"][here], one["text"][here]
    other["image"][4] += 1
    made = []
    for name, found in (("silo-00", one), ("silo-01", other)):
        np.savez(tmp_path / f"{name}.npz", **found)
        made.append(site(tmp_path, name, {"name": "features", "path": f"{name}.npz"}))
    return made[0], made[1]


def test_items_at_two_sites_are_counted_by_split_and_named_at_their_site(
    two: tuple[Path, Path], tmp_path: Path
) -> None:
    files = [fingerprint(tmp_path, each) for each in two]
    found = json.loads(printed("data", "overlap", *files, "--json", "--names", files[1].with_suffix(".names")))
    assert found["overlap"] == [
        {"one": ["silo-00", "train"], "other": ["silo-01", "test"], "images": 1, "captions": 2},
        {"one": ["silo-00", "train"], "other": ["silo-01", "train"], "images": 1, "captions": 1},
    ]
    assert found["items"] == ["2-0", "2-4", "2-5"]
    told = printed("data", "overlap", *files)
    assert "2 pairs of splits of the silos with the same images or captions:" in told
    assert "  silo-00 train, silo-01 test: 1 image and 2 captions; figures measured on these held-out items are" in told


def test_a_file_shows_neither_order_nor_items_and_needs_one_secret(two: tuple[Path, Path], tmp_path: Path) -> None:
    one = fingerprint(tmp_path, two[0])
    made = read_json(one, OverlapFile, "digests")
    for split in made.splits.values():
        assert split.images == sorted(split.images)
        assert split.captions == sorted(split.captions)
    assert "1-3" not in one.read_text()
    other = fingerprint(tmp_path, two[1], secret(tmp_path, "5b" * 32))
    assert "the key with which" in refused("data", "overlap", one, other)
    assert not set(made.splits["train"].images) & set(read_json(other, OverlapFile, "digests").splits["train"].images)
    assert "a second file of silo-00" in refused("data", "overlap", one, one)
    assert "a secret of 8 characters" in refused("data", "fingerprint", two[0], "--key", secret(tmp_path, "password"))
    (key := secret(tmp_path)).chmod(0o644)
    assert "chmod 600" in refused("data", "fingerprint", two[0], "--key", key)
    one.write_text(one.read_text().replace(made.splits["train"].images[0], "no digest"))
    assert "splits.train.images.0: found 'no digest'" in refused("data", "overlap", one)


def test_copies_of_files_and_captions_with_other_punctuation_are_found_and_modalities_left_out_are_not(
    tmp_path: Path,
) -> None:
    for name, captions in (("a", ["Two dogs, on a BEACH.", "a cat"]), ("b", ["two dogs on a beach", "a cup"])):
        folder = tmp_path / name
        folder.mkdir()
        for number, caption in enumerate(captions):
            shade = 40 if number == 0 else 200 + ord(name) % 50  # the first image is the same at both sites
            Image.new("RGB", (8, 8), (shade, number, 0)).save(folder / f"{name}{number}.png")
            (folder / f"{name}{number}.txt").write_text(caption)
    data: dict[str, object] = {"name": "folder", "queries": 1, "val": 0}
    first = fingerprint(tmp_path, site(tmp_path, "a", {**data, "path": "a"}))
    for used, *expected in ((["image", "text"], 1, 1), (["text"], 0, 1)):
        second = fingerprint(tmp_path, site(tmp_path, "b", {**data, "path": "b"}, modalities=used))
        found = json.loads(printed("data", "overlap", first, second, "--json"))["overlap"]
        assert [sum(each[what] for each in found) for what in ("images", "captions")] == expected


def test_a_simulation_counts_what_its_silos_share(tmp_path: Path) -> None:
    found = items(3, 40)
    found["silo"] = np.repeat(["x", "y"], 20)
    found["image"][21], found["text"][22] = found["image"][1], found["text"][4]  # trained by both; x holds out 4
    np.savez(tmp_path / "all.npz", **found)
    path = tmp_path / "all.yaml"
    scenario = {
        "name": "all", "rounds": 2, "protocol": "fedavg", "silos": {"count": 2}, "backbone": {"name": "features"},
        "data": {"name": "features", "path": str(tmp_path / "all.npz")},
        "partition": {"kind": "column", "column": "silo"},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(scenario))
    assert json.loads(printed("data", "check", path, "--json"))["overlap"] == [
        {"one": ["silo-00", "test"], "other": ["silo-01", "train"], "images": 0, "captions": 1},
        {"one": ["silo-00", "train"], "other": ["silo-01", "train"], "images": 1, "captions": 0},
    ]
    alone = json.loads(printed("data", "check", path, "--json", "--set", "missing_modality.silos={silo-01: text}"))
    assert [each["images"] for each in alone["overlap"]] == [0], "silo-01 does not use its images"
    assert "  silo-00 test, silo-01 train: 1 caption; figures" in printed("data", "check", path)
