"""A first scenario or site file for a user's own data, with the reader that fits them and settings for their size."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedmq.config.scenario import Data
from fedmq.data import catalogue
from fedmq.data.raw_set import U8, RawSet, unreadable, whole
from fedmq.data.readers import manifest, parquet
from fedmq.data.readers.features import read_features
from fedmq.data.splits import SPLITS
from fedmq.encoders.image_sets import files_below
from fedmq.encoders.images import IMAGE_ENDINGS
from fedmq.errors import InputError
from fedmq.text import Progress, first_few

FEATURES = (".npz", ".safetensors")
#: Minimum number of training items of a silo: methods that compare the pairs of a batch need two.
LEAST = 2
#: Number of items below which a fifth of the items is held out for the test instead of a tenth.
FEW = 200
_FORMS = (
    f"a folder of images with .txt files or metadata.csv, a list ({', '.join(manifest.READERS)}), "
    f"{' or '.join(parquet.ENDINGS)} files, tar files, or features ({' or '.join(FEATURES)})"
)


def reader_of(path: Path, *, images_alone: bool = False) -> str:
    """The ``data.name`` that reads a file or folder, judged by names alone.

    With ``images_alone`` a folder may have images without any caption.

    Raises:
        InputError: it does not exist, or no reader fits it.
    """
    if path.is_file():
        ending = path.suffix.lower()
        for name, endings in (
            ("manifest", tuple(manifest.READERS)),
            ("parquet", parquet.ENDINGS),
            ("webdataset", (".tar",)),
            ("features", FEATURES),
        ):
            if ending in endings:
                return name
        raise InputError("--data", str(path), _FORMS)
    if not path.is_dir():
        raise InputError("--data", str(path), f"an existing file or folder: {_FORMS}")
    found = {file.suffix.lower() for file in files_below(path)}
    if any(file.name in manifest.METADATA for file in files_below(path)):
        return "folder"
    if any(file.suffix == ".tar" for file in path.iterdir()):
        return "webdataset"
    if found & set(parquet.ENDINGS):
        return "parquet"
    lists = sorted(file for file in path.iterdir() if file.suffix.lower() in manifest.READERS)
    if found & IMAGE_ENDINGS and (".txt" in found or (images_alone and not lists)):
        return "folder"
    if lists:
        raise InputError("--data", str(path), f"the list itself: {', '.join(map(str, lists[:3]))}")
    raise InputError("--data", f"{path}, without captions", _FORMS)


@dataclass(frozen=True)
class OwnData:
    """A user's data, counted."""

    name: str  # ``data.name``
    path: Path  # absolute path
    items: int  # number of items
    captions: int  # number of captions
    pairs: int  # number of items with an image and captions
    # Number of training and of test pairs, of data that define the split or whose split is always drawn in these
    # proportions; None if the scenario can say how many to draw.
    split: tuple[int, int] | None
    # Names of the items that lack an image or captions and are left out, each with the reason.
    left_out: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()  # a line for each reason for which files are not read
    example: str = ""  # one item with its captions and labels, in a line; empty if captions are unknown as text
    unopened: int = 0  # number of images that were not opened, because there are very many
    missing: str = ""  # the ``data.missing`` with which these items are read; empty for the default

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know, a line each."""
        notes = (
            (self.example, self.example),
            (self.left_out, f"items left out ({len(self.left_out)}): {first_few(self.left_out)}"),
            (self.missing == "keep", f"images without captions, used as images only: {self.items - self.pairs}"),
            (self.unopened, f"{self.unopened:,} images were not opened; fedmq data check opens all of them"),
        )
        return (*(line for held, line in notes if held), *self.ignored)

    @property
    def most_silos(self) -> int:
        """Maximum number of silos that get enough training items and at least one test item."""
        if self.split is not None:
            return min(self.split[0] // LEAST, self.split[1])
        return self.pairs // (LEAST + 1)


def count(path: Path, progress: Progress | None = None, *, images_alone: bool = False) -> OwnData:
    """Read the annotations of a user's data and open the images, as :func:`unreadable` does.

    Images without captions count as items if ``images_alone``; otherwise they are left out.

    Raises:
        InputError: no reader fits the data, they are malformed, or an image cannot be read.
    """
    path = path.expanduser()
    path = Path(whole(str(path), "--data")).absolute()
    name = reader_of(path, images_alone=images_alone)
    if name == "features":
        read = read_features(path, 0)
        both = np.ones(len(read.image), np.bool_) if read.present is None else read.present[:, 0] & read.present[:, 1]
        return OwnData(
            name, path, len(both), int(read.captions.sum()), int(both.sum()), _train_and_test(read.split, both)
        )
    raw = catalogue.find(name).read(Data(name=name, path=path, missing="keep" if images_alone else "skip"))
    incomplete = _incomplete(raw)
    alone = images_alone and bool(incomplete) and not any(map(raw.images.missing, incomplete))
    if alone:
        raw, incomplete = replace(raw, unpaired=True), {}
    left_out = tuple(f"{raw.keys[row]} ({reason})" for row, reason in incomplete.items())
    kept = raw.subset([row for row in range(len(raw)) if row not in incomplete]) if incomplete else raw
    if len(kept) <= LEAST:
        found = f"{len(kept)} items with image and caption" + (f"; without: {first_few(left_out)}" if left_out else "")
        raise InputError(str(path), found, f"at least {LEAST + 1}{_where(raw, incomplete)}")
    opened = unreadable(kept, progress)
    if opened.names:
        found = f"{len(opened.names)} of {opened.tried} images that cannot be read: {first_few(opened.names)}"
        raise InputError(str(path), found, "images, e.g. JPEG or PNG; repair or remove these")
    both = np.array([bool(captions) for captions in kept.captions]) & kept.with_image
    split = None if kept.split is None else _train_and_test(kept.split, both)
    captions = sum(map(len, kept.captions))
    pairs, unopened = int(both.sum()), int(kept.with_image.sum()) - opened.tried
    missing = "keep" if alone else "skip" if left_out else ""
    ignored = tuple(raw.ignored_lines)
    return OwnData(name, path, len(kept), captions, pairs, split, left_out, ignored, kept.example, unopened, missing)


def _train_and_test(split: U8, both: npt.NDArray[np.bool_]) -> tuple[int, int]:
    train, test = (int(((split == SPLITS.index(name)) & both).sum()) for name in ("train", "test"))
    return train, test


def _incomplete(raw: RawSet) -> dict[int, str]:
    """Rows that a run would refuse, unless the data say so of each item, with the reason."""
    found = {row: "no caption" for row in range(len(raw)) if not (raw.captions[row] or raw.unpaired)}
    return found | {row: "no such file" for row in range(len(raw)) if raw.images.missing(row)}


def _where(raw: RawSet, incomplete: Mapping[int, str]) -> str:
    """Where the first missing image was looked for."""
    row = next((row for row in incomplete if raw.images.missing(row)), None)
    return "" if row is None else f"; e.g. {raw.images.name(row)} does not exist, paths start at the folder of the list"


@dataclass(frozen=True)
class Plan:
    """Settings of the first scenario."""

    silos: int  # number of silos
    missing: float  # fraction of silos that lack a modality, 0 to 1
    method: str  # ``protocol.name``
    rounds: int = 20  # number of rounds


def _drawn(data: OwnData, silos: int) -> tuple[int, str]:
    """Number of training pairs, and the keys of ``data`` that say how many items to draw for the test."""
    if data.split is not None:
        return data.split[0], ""
    tenth = data.items // 10
    if data.items >= FEW and tenth >= silos:
        return data.pairs - 2 * tenth, ""
    # A tenth of few items is too few to measure with: a fifth, as far as the silos can spare it, and no validation.
    queries = max(silos, min(data.items // 5, data.pairs - LEAST * silos))
    return data.pairs - queries, f", queries: {queries}, val: 0"


def scenario_text(name: str, data: OwnData, plan: Plan) -> str:
    """The scenario as YAML with comments; characters that its name may not have become ``-``.

    Raises:
        InputError: there are more silos than the data allow, or a number is out of range.
    """
    if not 1 <= plan.silos <= data.most_silos:
        allowed = f"1 to {data.most_silos}: each silo needs {LEAST} of the {data.pairs} pairs to train on, one to test"
        raise InputError("--silos", plan.silos, allowed)
    if not 0 <= plan.missing < 1:
        raise InputError("--missing", plan.missing, "a fraction of the silos: 0 or more, below 1")
    trained, drawn = _drawn(data, plan.silos)
    clusters = min(10, trained // 4)
    if clusters >= 2:
        partition = f"partition: {{kind: dir_clusters, alpha: 0.5, clusters: {clusters}, sizes: equal, least: {LEAST}}}"
        why = (
            "# Silos get different topics: clusters of captions, distributed unevenly. A larger alpha makes silos "
            "more alike."
        )
    else:
        partition = f"partition: {{kind: iid, least: {LEAST}}}"
        why = "# Too few items for topics: distributed at random."
    backbone = "features" if data.name == "features" else "lite"
    kept = f", missing: {data.missing}" if data.missing else ""
    lines = [
        f"# {data.items} items with {data.captions} captions, {trained} pairs of them to train on.",
        f"name: {plain_name(name)}",
        "seed: 0",
        "# Merges of the shared model. More rounds train longer.",
        f"rounds: {plan.rounds}",
        "# The federated method; fedmq protocols lists all of them and their options.",
        f"protocol: {{name: {json.dumps(plan.method)}}}",
        *(["# Items without an image or a caption are left out."] if kept else []),
        f"data: {{name: {data.name}, path: {json.dumps(str(data.path), ensure_ascii=False)}{drawn}{kept}}}",
        "# The frozen encoders. Larger ones: docs/reference/backbones.md.",
        f"backbone: {{name: {backbone}}}",
        f"silos: {{count: {plan.silos}}}",
        why,
        partition,
        "# Fraction of silos that have only images or only captions.",
        f"missing_modality: {{rate: {plan.missing:g}}}",
        "training: {learning_rate: 1.0e-3, batch_size: 32}",
        "# Measured on the test items, after every fifth round and the last one.",
        "evaluation: {every: 5, split: test}",
    ]
    return "\n".join(lines) + "\n"


def site_text(file: Path, data: OwnData, silo: str, address: str) -> str:
    """A site file for a silo with its own data, as YAML with comments."""
    folder = file.absolute().parent
    place = data.path.relative_to(folder) if data.path.is_relative_to(folder) else data.path
    notes = {
        "keep": ["# Images without captions are used as images only; missing: skip would leave them out."],
        "skip": ["# Items without an image or a caption are left out."],
    }
    kept = f", missing: {data.missing}" if data.missing else ""
    lines = [
        f"# A silo with its own data: {data.items} items with {data.captions} captions.",
        "# Relative paths start at the folder of this file. docs/howto/own_sites.md explains the keys.",
        "# The silo's name in this run: silo-00, silo-01, ... Each site has another one.",
        f"name: {silo}",
        "# The data stay on this machine.",
        *notes.get(data.missing, ()),
        f"data: {{name: {data.name}, path: {json.dumps(str(place), ensure_ascii=False)}{kept}}}",
        "# Use only the images, or only the captions, of these data:",
        "# modalities: [image]",
        "# Folder of the silo's private key and of the coordinator's public key.",
        "keys: keys",
        "# Address of the coordinator: tcp://HOST:PORT.",
        f"connect: {json.dumps(address, ensure_ascii=False)}",
        "# Folder for the message log and the personal state. Keep it: a restarted silo continues from it.",
        "out: run",
        "# auto, cpu, cuda or cuda:N; by default the device in the scenario:",
        "# device: auto",
        "# Folder of extracted features; by default $FEDMQ_CACHE, else ~/.cache/fedmq:",
        "# cache: cache",
        "# What the silo may send; docs/policies/own_sites.yaml is an example:",
        "# policy: policy.yaml",
    ]
    return "\n".join(lines) + "\n"


def plain_name(name: str) -> str:
    """A name that a scenario may have."""
    return re.sub(r"[^a-z0-9_.-]+", "-", name.lower()).strip("-._")[:48] or "mine"
