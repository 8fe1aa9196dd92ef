"""The kinds of files that fedmq reads: a valid example of each in a folder, and its reader."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
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
from fedmq.retrieval.encoded_gallery import GalleryMeta, open_gallery, write_items
from fedmq.retrieval.released_model import open_model
from fedmq.retrieval.search import nearest_items
from fedmq.runs.release import ReleaseConfig, ReleasedInputs, sign_model, verify_model
from fedmq.seeds import numpy_generator
from fedmq.storage.run_folder import write_json
from fedmq.wire.key_requests import acceptance_of, new_request, read_request
from fedmq.wire.keys import init_keys, load_accepted, load_identity
from tests import data_set_folders
from tests.array_files import ARRAY_FILES, PIXELS, saved
from tests.damaged_files import Folder, Kind, files_of
from tests.data_set_folders import FORMS, PUBLISHED
from tests.encoder_file_kinds import ENCODER_KINDS
from tests.result_file_kinds import RESULT_KINDS
from tests.run_file_kinds import RUN_KINDS
from tests.state_file_kinds import STATE_KINDS

_MODEL = "0" * 64  # digest of the model of the galleries below
_SCENARIO = """name: fuzz
rounds: 3
protocol: {name: rcsr, filler: zero}
data: {name: openmoji}
silos: &silos {count: 4}
partition: {kind: dir_clusters, alpha: 0.5, clusters: 10, sizes: equal}
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


# --- data sets ------------------------------------------------------------------------------------------------------
_LISTS = {
    "open_clip.csv": "filepath\ttitle\n1.png\ta, 1\n2.png\ta, 2\n3.png\ta, 3\n",
    "metadata.csv": "file_name,text\n1.png,a 1\n2.png,a 2\n3.png,a 3\n",
}


def _list(name: str) -> Kind:
    def make(folder: Path) -> None:
        data_set_folders.photos(folder)
        (folder / name).write_text(_LISTS[name])

    read = ("folder", "") if name == "metadata.csv" else ("manifest", name)
    return Kind(partial(files_of, make), partial(_check, *read))


def _arrays(name: str) -> Kind:
    write, set_name = ARRAY_FILES[name]

    def read(folder: Path) -> object:
        path = folder / name
        return read_features(path) if set_name == "features" else read_arrays(Data(name=set_name, path=path))

    return Kind(partial(files_of, lambda folder: write(folder / name)), read)


def _pixels(name: str) -> Kind:
    arrays = {"IAll": PIXELS, "YAll": np.eye(6, 5), "LAll": np.eye(6, 4)}
    return _published("mirflickr", lambda folder: saved(folder / name, arrays), name)


def _form(name: str) -> Kind:
    with tempfile.TemporaryDirectory(prefix="fedmq-fuzz-") as folder:
        set_name, path = FORMS[name](Path(folder))
        return _published(set_name, FORMS[name], str(path.relative_to(folder)))


def _other_images(folder: Path) -> None:
    """Images of several formats, also with one channel of 16 bits, and of floating-point values."""
    endings = ("jpeg", "tiff", "webp", "gif", "bmp", "ppm", "ico")
    for row, ending in enumerate(endings):
        data_set_folders.photo(folder / f"{row}.{ending}", row)
    grey = numpy_generator(0, "fuzz", "formats").integers(0, 256, (12, 10))
    Image.fromarray(grey.astype(np.uint16) << 8).save(folder / "7.png")
    Image.fromarray(grey / np.float32(255)).save(folder / "8.tif")
    names = sorted(path.name for path in folder.iterdir())
    (folder / "list.csv").write_text("\n".join(["image,caption", *(f"{name},a {name}" for name in names)]))


def _videos(folder: Path) -> None:
    frames = numpy_generator(0, "fuzz", "video").integers(0, 256, (6, 24, 32, 3), dtype=np.uint8)
    for ending, codec in (("mp4", "mpeg4"), ("avi", "mjpeg")):
        data_set_folders.video(folder / f"video.{ending}", frames, codec)


def _read_videos(folder: Path) -> object:
    return [video_frames(folder / f"video.{ending}", 3) for ending in ("mp4", "avi")]


def _own_file() -> Folder:
    return {"mine.py": b"from dataclasses import dataclass\n\n\n@dataclass\nclass Options:\n    weight: float = 0.5\n"}


def _published(name: str, write: Callable[[Path], object], file: str = "") -> Kind:
    """A data set as it is distributed."""
    return Kind(partial(files_of, write), partial(_check, name, file))


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
    write_items(folder / "items.jsonl", [(key, ["a", "b"]) for key in keys])
    write_json(folder / "gallery.json", meta.plain())


def _search(folder: Path) -> object:
    gallery = open_gallery(folder, _MODEL)
    vector = np.ones((1, 6), np.float32)
    hits = [hit for among in ("images", "captions") for hit in nearest_items(gallery, vector, among, 3)]
    return json.dumps([vars(hit) for hit in hits], default=str)


def _kinds() -> dict[str, Kind]:
    return {
        **{name: _arrays(name) for name in ARRAY_FILES},
        **{f"pixels.{ending}": _pixels(f"pixels.{ending}") for ending in ("mat", "h5")},
        **{name: _list(name) for name in _LISTS},
        **{name: _form(name) for name in FORMS},
        "pictures of other formats": _published("manifest", _other_images, "list.csv"),
        "videos": Kind(partial(files_of, _videos), _read_videos),
        **{name: _published(name, write) for name, write in PUBLISHED.items()},
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
