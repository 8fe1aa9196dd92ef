"""The kinds of files that fedmq reads: a valid example of each in a folder, and its reader."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow
import pyarrow.parquet
import safetensors.numpy
import torch
from PIL import Image

import protocols  # noqa: F401 - registers the objectives
from fedmq.audit.policy import read_policy
from fedmq.audit.signatures import KnownKeys, read_expected
from fedmq.cli.data import show_data
from fedmq.config import plug_ins, site
from fedmq.config import resolve as scenarios
from fedmq.config.scenario import Backbone, Data, Objective
from fedmq.data.readers.arrays import read_arrays
from fedmq.data.readers.features import read_features
from fedmq.encoders.base import InputSpec
from fedmq.encoders.images import video_frames
from fedmq.experiments import files
from fedmq.launch.data_check import check_raw
from fedmq.models.build import build
from fedmq.retrieval.gallery import GalleryMeta, open_gallery
from fedmq.retrieval.released_model import open_model
from fedmq.retrieval.search import nearest_items
from fedmq.runs.release import ReleaseConfig, ReleasedInputs, sign_model, verify_model
from fedmq.seeds import numpy_generator
from fedmq.storage.run_folder import write_json
from fedmq.wire.key_requests import acceptance_of, new_request, read_request
from fedmq.wire.keys import init_keys, load_accepted, load_identity
from tests import data_set_folders
from tests.array_files import saved
from tests.damaged_files import Folder, Kind, files_of
from tests.encoder_file_kinds import ENCODER_KINDS
from tests.result_file_kinds import RESULT_KINDS
from tests.run_file_kinds import RUN_KINDS
from tests.state_file_kinds import STATE_KINDS

_MODEL = "0" * 64  # digest of the model of the galleries below
_SPLITS = ("train", "train", "train", "train", "val", "test", "test")
_SCENARIO = """name: fuzz
rounds: 3
protocol: {name: rcsr, filler: zero}
data: {name: openmoji}
silos: &silos {count: 4}
partition: {kind: dir_clusters, alpha: 0.5, clusters: 10}
training: {learning_rate: 1.0e-3, batch_size: 16}
missing_modality: {silos: {silo-00: image, silo-01: text}}
faults:
  - {kind: drop, share: 0.1}
  - {kind: late, silos: [silo-02], seconds: 3}
"""
_SITE = """name: silo-01
data: {name: folder, path: photos, captions: 2}
modalities: [image, text]
device: cpu
keys: keys
connect: tcp://127.0.0.1:5555
out: run
policy: policy.yaml
"""
_COMPARISON = """compare: [scenario.yaml]
set: [rounds=2, training.batch_size=8]
vary: ["protocol=fedavg,rcsr", "training.learning_rate=1e-3,1e-2"]
seeds: [0, 1]
metric: mean_r1
target: ["mean_r1=0.5"]
"""
_TUNE = """tune: scenario.yaml
set: [rounds=2]
search:
  training.learning_rate: {low: 1.0e-4, high: 1.0e-1, log: true}
  training.batch_size: [8, 16]
methods: {fedavg: {}, rcsr: {protocol.tau: {low: 0.01, high: 0.2, step: 0.01}}}
trials: 4
seeds: [0]
"""
_POLICY = """up: {kinds: [delta, loss], bytes_in_all: 1000000, fields: {delta: [buffer]}}
down: {bytes_per_message: 5000}
silos: {silo-01: {up: {kinds: [loss]}}}
peers: [coordinator, silo-00, silo-01]
"""


# --- arrays ---------------------------------------------------------------------------------------------------------
def _arrays() -> dict[str, Any]:
    generator = numpy_generator(0, "fuzz", "arrays")
    return {
        "image": generator.normal(size=(12, 4)).astype(np.float32),
        "text": generator.normal(size=(12, 3, 5)).astype(np.float32),
        "labels": np.arange(12) % 3,
        "captions": np.array([1, 2, 3] * 4),
        "keys": np.array([f"k{row}" for row in range(12)]),
        "split": np.array([0] * 8 + [1, 2, 2, 2]),
    }


def _file(name: str, arrays: Callable[[], dict[str, Any]]) -> Folder:
    return files_of(lambda folder: saved(folder / name, arrays()))


def _safetensors() -> Folder:
    return {
        "f.safetensors": safetensors.numpy.save(
            {name: value for name, value in _arrays().items() if name != "keys"},
            {"label_names": json.dumps(["a", "b", "c"])},
        )
    }


def _parts() -> dict[str, Any]:
    given = _arrays()
    return {"IAll": given["image"], "YAll": given["text"][:, 0], "LAll": np.eye(3)[given["labels"]]}


def _pixels() -> dict[str, Any]:
    pixels = numpy_generator(0, "fuzz", "pixels").integers(0, 256, (6, 8, 9, 3), dtype=np.uint8)
    return {"IAll": pixels, "YAll": np.eye(6, 5), "LAll": np.eye(6, 4)}


def _read_parts(name: str, folder: Path) -> object:
    return read_arrays(Data(name="mirflickr", path=folder / name, queries=2, train=4))


# --- sets of pictures -----------------------------------------------------------------------------------------------
def _png(number: int) -> bytes:
    pixels = numpy_generator(0, "fuzz", number).integers(0, 256, (12, 10, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def _photos(count: int = 9) -> dict[str, bytes]:
    return {f"{row}.png": _png(row) for row in range(count)}


def _other_images() -> Folder:
    found: dict[str, bytes] = {}
    generator = numpy_generator(0, "fuzz", "formats")
    for row, ending in enumerate(("jpeg", "tiff", "webp", "gif", "bmp", "ppm", "png", "tif", "ico")):
        # The seventh and eighth have one channel of 16 bits, and of floating-point values.
        pixels: Any = generator.integers(0, 256, (12, 10, 3), dtype=np.uint8)
        pixels = {"png": pixels[..., 0].astype(np.uint16) << 8, "tif": pixels[..., 0] / np.float32(255)}.get(
            ending, pixels
        )
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "tiff" if ending == "tif" else ending)
        found[f"{row}.{ending}"] = file.getvalue()
    return {"list.csv": "\n".join(["image,caption", *(f"{name},a {name}" for name in found)]).encode(), **found}


def _videos() -> Folder:
    found = {}
    for ending, codec in (("mp4", "mpeg4"), ("avi", "mjpeg")):
        file = io.BytesIO()
        with av.open(file, "w", format=ending) as container:
            stream: Any = container.add_stream(codec, rate=10)
            stream.width, stream.height = 32, 24
            stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
            for number in range(6):
                pixels = numpy_generator(0, "fuzz", number).integers(0, 256, (24, 32, 3), dtype=np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            container.mux(stream.encode())
        found[f"video.{ending}"] = file.getvalue()
    return found


def _read_videos(folder: Path) -> object:
    return [video_frames(folder / f"video.{ending}", 3) for ending in ("mp4", "avi")]


def _own_file() -> Folder:
    return {"mine.py": b"from dataclasses import dataclass\n\n\n@dataclass\nclass Options:\n    weight: float = 0.5\n"}


def _csv() -> Folder:
    lines = ["image,captions,labels,split"]
    lines += [f"{row}.png,\"one|a dog, {row}\",\"['a', 'b']\",{'train' if row < 6 else 'test'}" for row in range(9)]
    return {"list.csv": "\n".join(lines).encode(), **_photos()}


def _open_clip() -> Folder:
    return {"list.csv": "\n".join(["filepath\ttitle", *(f"{row}.png\ta, {row}" for row in range(9))]).encode(),
            **_photos()}  # fmt: skip


def _jsonl() -> Folder:
    items = [
        {"image": f"{row}.png", "captions": ["a", f"b {row}"], "labels": ["x"], "split": "train" if row < 6 else "test"}
        for row in range(9)
    ]
    return {"list.jsonl": "\n".join(map(json.dumps, items)).encode(), **_photos()}


def _texts() -> Folder:
    found: dict[str, bytes] = {}
    for split, rows in (("train", (0, 1, 2)), ("val", (3, 4)), ("test", (5, 6))):
        for row in rows:
            found |= {f"{split}/{row}.png": _png(row), f"{split}/{row}.txt": f"a {row}\nb {row}\n".encode()}
    return found


def _imagefolder(ending: str) -> Folder:
    if ending == "csv":
        lines = ["file_name,text", *(f"{row}.png,a {row}" for row in range(9))]
    else:
        lines = [json.dumps({"file_name": f"{row}.png", "captions": [f"a {row}"]}) for row in range(9)]
    return {f"metadata.{ending}": "\n".join(lines).encode(), **_photos()}


def _table() -> pyarrow.Table:
    rows = range(len(_SPLITS))
    images = [{"bytes": _png(row), "path": f"{row}.png"} for row in rows]
    more = {"labels": [["x", "y"][: 1 + row % 2] for row in rows], "split": list(_SPLITS)}
    return pyarrow.table({"image": images, "captions": [[f"a {row}", "b"] for row in rows], **more})


def _parquet() -> Folder:
    file = io.BytesIO()
    pyarrow.parquet.write_table(_table(), file, row_group_size=3)
    return {"t.parquet": file.getvalue()}


def _arrow() -> Folder:
    file, table = io.BytesIO(), _table()
    with pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return {"t.arrow": file.getvalue()}


def _tar() -> Folder:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for row in range(5):
            about = json.dumps({"caption": f"a {row}", "label": row}).encode()
            for name, content in ((f"{row}.png", _png(row)), (f"{row}.json", about), (f"{row}.txt", b"b\nc")):
                info = tarfile.TarInfo(f"set/{name}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return {"00000.tar": file.getvalue()}


def _published(name: str, write: Callable[[Path], object]) -> Kind:
    """The layout in which a data set is distributed."""
    return Kind(partial(files_of, write), partial(_check, name, ""))


def _check(name: str, file: str, folder: Path) -> object:
    """What ``fedmq data check`` does, which decodes every image."""
    facts = check_raw(Data(name=name, path=folder / file))
    with contextlib.redirect_stdout(io.StringIO()):
        show_data(facts)
    json.dumps(facts.to_plain())
    return facts


# --- files of experiments and sites ---------------------------------------------------------------------------------
def _yaml(name: str, text: str, *, with_scenario: bool = False) -> Folder:
    return {name: text.encode(), **({"scenario.yaml": _SCENARIO.encode()} if with_scenario else {})}


def _keys(folder: Path) -> object:
    init_keys(folder, ("coordinator", "silo-00"))
    return new_request(folder, "silo-01")


def _read_keys(folder: Path) -> object:
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o600)
    accepted, own = load_accepted(folder), load_identity(folder, "silo-00")
    request = read_request(folder / "silo-01.request")
    assert KnownKeys.load(folder).all
    return accepted, own, acceptance_of(folder, folder / "silo-01.request", request)


def _heads() -> Folder:
    noted = {"records": 7, "head": "a" * 64, "keys": ["b" * 64]}
    return {"heads.json": json.dumps({"run": "fuzz", "heads": {"coordinator": noted, "silo-00": noted}}).encode()}


# --- models and galleries -------------------------------------------------------------------------------------------
def _model(folder: Path) -> object:
    """A released model of precomputed features, with its signature."""
    torch.set_num_threads(1)
    backbone, objective = Backbone(name="features", bottleneck=4), Objective(base="info_nce")
    inputs = InputSpec((4,), (4,), "float32", "float32", (), ())
    model = build(backbone, inputs, 0)
    theta = model.flat.detach().numpy()
    views = {name: np.array(view) for name, view in model.layout.views(theta).items()}
    (folder / "model.safetensors").write_bytes(safetensors.numpy.save(views))
    config = ReleaseConfig(
        backbone=backbone.model_dump(mode="json"),
        objective=objective.model_dump(mode="json"),
        protocol="fedavg",
        dim=model.dim,
        layout_digest=model.layout.digest,
        layout=[entry.name for entry in model.layout.entries],
        model_digest=model.layout.model_digest(theta),
        released_with={},
        seed=0,
        inputs=ReleasedInputs(
            image_shape=[4], text_shape=[4], image_dtype="float32", text_dtype="float32", mean=[], std=[]
        ),
        label_names=["a", "b"],
        texts="vectors",
    )
    write_json(folder / "config.json", config.plain())
    with tempfile.TemporaryDirectory(prefix="fedmq-fuzz-") as keys:
        init_keys(Path(keys), ("coordinator",))
        return sign_model(folder, load_identity(Path(keys), "coordinator"))


def _open_model(folder: Path) -> object:
    return open_model(folder).alone()


def _gallery(folder: Path) -> None:
    generator = numpy_generator(0, "fuzz", "gallery")
    image, text = (generator.normal(size=(rows, 6)).astype(np.float32) for rows in (5, 9))
    keys = [f"k{row}" for row in range(5)]
    meta = GalleryMeta(format=1, model_digest=_MODEL, binary=False, dim=6, items=5, captions=9)
    owner = np.array([0, 0, 1, 2, 2, 3, 3, 4, 4])
    for name, array in {"owner": owner, "image": image, "text": text}.items():
        np.save(folder / f"{name}.npy", array)
    (folder / "items.json").write_text(json.dumps({"keys": keys, "captions": [["a", "b"]] * 5}))
    write_json(folder / "gallery.json", meta.plain())


def _search(folder: Path) -> object:
    gallery = open_gallery(folder, _MODEL)
    vector = np.ones((1, 6), np.float32)
    hits = [hit for among in ("images", "captions") for hit in nearest_items(gallery, vector, among, 3)]
    return json.dumps([vars(hit) for hit in hits], default=str)


def _kinds() -> dict[str, Kind]:
    return {
        "npz": Kind(partial(_file, "f.npz", _arrays), lambda folder: read_features(folder / "f.npz")),
        "safetensors": Kind(_safetensors, lambda folder: read_features(folder / "f.safetensors")),
        "mat": Kind(partial(_file, "f.mat", _parts), partial(_read_parts, "f.mat")),
        "hdf5": Kind(partial(_file, "f.h5", _parts), partial(_read_parts, "f.h5")),
        "pixels in mat": Kind(partial(_file, "f.mat", _pixels), partial(_check, "mirflickr", "f.mat")),
        "pixels in hdf5": Kind(partial(_file, "f.h5", _pixels), partial(_check, "mirflickr", "f.h5")),
        "csv": Kind(_csv, partial(_check, "manifest", "list.csv")),
        "jsonl": Kind(_jsonl, partial(_check, "manifest", "list.jsonl")),
        "open_clip": Kind(_open_clip, partial(_check, "manifest", "list.csv")),
        "pictures with texts": Kind(_texts, partial(_check, "folder", "")),
        "metadata.csv": Kind(partial(_imagefolder, "csv"), partial(_check, "folder", "")),
        "metadata.jsonl": Kind(partial(_imagefolder, "jsonl"), partial(_check, "folder", "")),
        "pictures of other formats": Kind(_other_images, partial(_check, "manifest", "list.csv")),
        "videos": Kind(_videos, _read_videos),
        "parquet": Kind(_parquet, partial(_check, "parquet", "t.parquet")),
        "arrow": Kind(_arrow, partial(_check, "parquet", "t.arrow")),
        "webdataset": Kind(_tar, partial(_check, "webdataset", "00000.tar")),
        "flickr8k": _published("flickr8k", data_set_folders.flickr8k_release),
        "flickr30k": _published("flickr30k", partial(data_set_folders.flickr, name="flickr30k")),
        "coco": _published("coco", data_set_folders.coco),
        "iapr": _published("iapr", data_set_folders.iapr),
        "msrvtt": _published("msrvtt", partial(data_set_folders.msrvtt, frames=2)),
        "mirflickr": _published("mirflickr", data_set_folders.mirflickr),
        "nuswide": _published("nuswide", data_set_folders.nuswide),
        "wikipedia": _published("wikipedia", data_set_folders.wikipedia),
        "pascal": _published("pascal", data_set_folders.pascal),
        "scenario": Kind(
            partial(_yaml, "scenario.yaml", _SCENARIO), lambda folder: scenarios.load(folder / "scenario.yaml")
        ),
        "site": Kind(partial(_yaml, "silo.yaml", _SITE), lambda folder: site.read_site(folder / "silo.yaml")),
        "policy": Kind(partial(_yaml, "policy.yaml", _POLICY), lambda folder: read_policy(folder / "policy.yaml")),
        "comparison": Kind(
            partial(_yaml, "compare.yaml", _COMPARISON, with_scenario=True),
            lambda folder: files.read_comparison(folder / "compare.yaml"),
        ),
        "tuning": Kind(
            partial(_yaml, "tune.yaml", _TUNE, with_scenario=True),
            lambda folder: files.read_search(folder / "tune.yaml"),
        ),
        "keys": Kind(partial(files_of, _keys), _read_keys),
        "own Python file": Kind(_own_file, lambda folder: plug_ins.adopt(folder / "mine.py")),
        "heads": Kind(_heads, lambda folder: read_expected(str(folder / "heads.json"))),
        "model": Kind(partial(files_of, _model), _open_model),
        "signed model": Kind(partial(files_of, _model), verify_model),
        "gallery": Kind(partial(files_of, _gallery), _search),
    }


KINDS: Mapping[str, Kind] = {**_kinds(), **ENCODER_KINDS, **RUN_KINDS, **RESULT_KINDS, **STATE_KINDS}
