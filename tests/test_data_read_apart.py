"""The files of a data set are read in a child process: the same values arrive, and what goes wrong is one line."""

from __future__ import annotations

import json
import tarfile
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmq.config import plug_ins
from fedmq.config.scenario import Backbone, Data
from fedmq.data import catalogue
from fedmq.data.prepare import prepare
from fedmq.data.raw_set import RawSet
from fedmq.data.readers import arrays
from fedmq.errors import InputError
from fedmq.storage import quarantine
from tests import data_set_folders
from tests.array_files import PIXELS, parts, saved
from tests.data_set_folders import FORMS, PUBLISHED
from tests.printed_code import ROOT, file_under

pytestmark = pytest.mark.slow


def _set(name: str, folder: Path) -> Data:
    """A published data set, one form of a user's own, or pixels."""
    if name == "pixels":
        stored = {"IAll": PIXELS, "TAll": np.eye(6, 5), "LAll": np.eye(6, 32)}
        return Data(name="ssense", path=saved(folder / "set.mat", stored))
    reader, path = (name, PUBLISHED[name](folder)) if name in PUBLISHED else FORMS[name](folder)
    return Data(name=reader, path=path, missing="keep")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if is_dataclass(one) and not isinstance(one, type):
        names = [field.name for field in fields(one) if not field.name.startswith("_")]
        return type(one) is type(other) and all(_same(getattr(one, name), getattr(other, name)) for name in names)
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize("name", [*PUBLISHED, *FORMS, "pixels"])
def test_a_data_set_is_read_elsewhere_and_arrives_as_it_was(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = _set(name, tmp_path)
    entry = catalogue.find(data.name)
    wanted = entry.read_here(data)
    monkeypatch.setattr(catalogue.DataSet, "read_here", None)  # in this process
    found = entry.read(data)
    assert _same(wanted, found)
    assert found.images.stamps() == wanted.images.stamps()
    row = int(np.flatnonzero(found.with_image)[0])
    assert np.array_equal(found.images.frames(row)[0], wanted.images.frames(row)[0])


def test_arrays_of_features_are_read_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(data: Data) -> None:
        raise AssertionError("read in this process")

    fail.__module__, fail.__qualname__ = arrays.read_arrays.__module__, "read_arrays"
    monkeypatch.setattr(arrays, "read_arrays", fail)
    data = Data(name="pascal", path=saved(tmp_path / "a.npz", parts()))
    assert prepare(data, Backbone(name="features"), tmp_path / "cache").n == 12


# --- what goes wrong ------------------------------------------------------------------------------------------------


def refused(data: Data, place: str, found: str) -> None:
    """Check that a data set is refused in one line, which names the place and says what was found."""
    with pytest.raises(InputError) as caught:
        catalogue.find(data.name).read(data)
    error = caught.value
    assert error.place.endswith(place) and found in str(error) and "\n" not in str(error), str(error)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("csv", "list.csv"),
        ("jsonl", "list.jsonl"),
        ("texts", "1.txt"),
        ("flickr30k", "dataset_flickr30k.json"),
        ("coco", "annotations/instances_train2014.json"),
        ("msrvtt", "MSRVTT_data.json"),
        ("iapr", "annotations_complete_eng/00/0.eng"),
        ("nuswide", "NUS_WID_Tags/AllTags1k.txt"),
    ],
)
def test_an_endless_line_takes_no_more_memory_than_allowed(
    name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = _set(name, tmp_path)
    with (tmp_path / file).open("ab") as endless:
        endless.truncate(1 << 28)
    monkeypatch.setattr(quarantine, "MEMORY", 1 << 26)
    monkeypatch.setattr(quarantine, "MEMORY_PER_BYTE", 0)
    refused(data, file, "more than 67,108,864 bytes")


DEEP = "[" * 1_000_000


@pytest.mark.parametrize(
    ("name", "file", "content"),
    [
        ("jsonl", "list.jsonl", f'{{"image": "1.png", "captions": {DEEP}\n'),
        ("flickr30k", "dataset_flickr30k.json", f'{{"images": {DEEP}'),
        ("coco", "annotations/instances_train2014.json", DEEP),
    ],
)
def test_json_that_nests_too_deeply_is_one_line(name: str, file: str, content: str, tmp_path: Path) -> None:
    data = _set(name, tmp_path)
    data_set_folders.write(tmp_path / file, content)
    refused(data, file, "recursion")


def test_deep_json_in_an_archive_is_one_line(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "set.tar", "w") as archive:
        data_set_folders.add(archive, "1.json", DEEP.encode())
    refused(Data(name="webdataset", path=tmp_path / "set.tar"), "set.tar: 1.json", "recursion")


# --- the user's own readers -----------------------------------------------------------------------------------------

READER = """
import ctypes, os, time
from dataclasses import dataclass
import numpy as np
from fedmq.data.catalogue import DataSet
from fedmq.data.raw_set import RawSet
from fedmq.data.readers import arrays
from fedmq.encoders.image_sets import ImageFiles, Images

class Plain(ImageFiles):
    pass

@dataclass(frozen=True)
class Own(ImageFiles):
    shade: int = 0

    def frames(self, row):
        return [np.full((8, 8, 3), self.shade, np.uint8)]

class Undescribed(Images):
    def __len__(self): return 2
    def frames(self, row): return []
    def name(self, row): return "an image"
    def stamps(self, on_progress=None): return "1", "2"
    def subset(self, rows): return self

def read(data):
    images = Own((data.path / "1.png", data.path / "2.png"), shade=7)
    {deed}
    return RawSet(f"process {{os.getpid()}}", ("1", "2"), images, (("one",), ("two",)))

DATA_SET = DataSet("a set of a test", read)
"""


HANGS = "while True: pass"


def _own(folder: Path, deed: str) -> Data:
    data_set_folders.photos(folder)
    code = data_set_folders.write(folder / "mine.py", READER.format(deed=deed))
    return Data(name=plug_ins.adopt(code), path=folder)


def test_the_reader_of_a_user_runs_elsewhere_and_its_own_images_arrive(tmp_path: Path) -> None:
    data = _own(tmp_path, "")
    here: RawSet = catalogue.find(data.name).read_here(data)
    found = catalogue.find(data.name).read(data)
    assert found.place != here.place and type(found.images) is type(here.images)
    assert found.images.frames(1)[0].tolist() == np.full((8, 8, 3), 7).tolist()


def test_the_reader_of_the_manual_runs_elsewhere(tmp_path: Path) -> None:
    code = data_set_folders.write(tmp_path / "pairs.py", file_under(ROOT / "docs/howto/own_methods.md", "A data set"))
    data_set_folders.photos(tmp_path / "photos")
    entries = [{"file": f"{number}.png", "class": "dog", "text": f"dog {number}"} for number in (1, 2)]
    data_set_folders.write(tmp_path / "list.json", json.dumps(entries))
    found = catalogue.find(name := plug_ins.adopt(code)).read(Data(name=name, path=tmp_path))
    assert found.captions == (("dog 1",), ("dog 2",)) and found.label_names == ("dog",)
    (tmp_path / "list.json").write_text(DEEP)
    refused(Data(name=name, path=tmp_path), "pairs.py: line 14", "RecursionError")


@pytest.mark.parametrize(
    ("deed", "place", "found"),
    [
        ("ctypes.string_at(0)", "", "its reader died of SIGSEGV"),
        ("os.write(2, b'no more\\n'); os._exit(3)", "", "its reader died with code 3: no more"),
        ("raise SystemExit(3)", "mine.py: line 29", "SystemExit: 3"),
        (HANGS, "", "s of processor time"),
        ("np.ones(1 << 40, np.uint8)", "", "Unable to allocate"),
        ("open(data.path / 'absent')", "mine.py: line 29", "FileNotFoundError: [Errno 2]"),
        ("data.path['x']", "mine.py: line 29", "TypeError: "),
        ("images = Undescribed()", "", "an object of type Undescribed"),
        ("return 3", "mine.py", "int"),
    ],
)
def test_a_reader_of_a_user_that_fails_or_dies_is_one_line(
    deed: str, place: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine, "WAITS", 600)
    monkeypatch.setattr(quarantine, "CPU_S", 1 if deed == HANGS else 600)
    refused(_own(tmp_path, deed), place or str(tmp_path), found)
