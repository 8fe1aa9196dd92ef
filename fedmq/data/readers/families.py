"""Icons of five families from Python packages: an embedded data set whose silos are natural.

A site is one style of one family, with its own way of drawing and its own names: Font Awesome, Lucide, Material Design
Icons in two styles, Phosphor in two, Tabler in two. No encoder or head of the ``lite`` backbone was trained on any of
them. ``docs/reference/embedded_data.md`` lists packages and licences.

A concept is a name's words without numbers and words of style, in any order. The set holds the concepts that at least
two families draw, each site's drawing of them once. Concepts, not drawings, are split: what is tested stands in no
family's training split. Of a concept of ``val`` or ``test`` one site's drawing is kept, so that a name fits one image.
"""

from __future__ import annotations

import functools
import sqlite3
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from json import loads
from pathlib import Path

import numpy as np

from fedmq import seeds
from fedmq.config.scenario import Data
from fedmq.data.raw_set import RawSet, checked
from fedmq.data.readers.openmoji import Drawings, Split, caption_candidates, drawn, kept_captions
from fedmq.data.splits import SPLITS
from fedmq.encoders.images import Pixels
from fedmq.errors import InputError
from fedmq.packages import package

# Thresholds on a concept's hash, scaled to [0, 1): below the first is train, below the second val, the rest test.
TRAIN_BELOW, VAL_BELOW = 0.60, 0.70
_SEED = 0
_STYLE_WORDS = {"outline", "filled", "fill", "solid", "line"}
# Distributions whose versions determine the pixels.
_PACKAGES = ("faicons", "python-lucide", "justmyresource-mdi", "justmyresource-phosphor", "tablericons2", "resvg_py")


@dataclass(frozen=True)
class Icon:
    """One drawing of a site."""

    svg: str  # its text
    terms: tuple[str, ...] = ()  # the family's search terms, if its package has them


@dataclass(frozen=True)
class Item:
    """One icon of the data set."""

    key: str  # ``STYLE/NAME``, e.g. ``"tabler-outline/dog-bowl"``.
    style: str  # the site, e.g. ``"tabler-outline"``.
    concept: str  # the name's words in alphabetical order, e.g. ``"bowl dog"``.
    captions: tuple[str, ...]  # one to five; the first is the name
    split: Split  # of the concept

    @property
    def family(self) -> str:
        """The family of the style, e.g. ``"tabler"``."""
        return family_of(self.style)


def family_of(style: str) -> str:
    """The family of a style: ``tabler`` of ``tabler-outline``."""
    return style.split("-", maxsplit=1)[0]


# --- packages -------------------------------------------------------------------------------------------------------


def _folder(name: str) -> Path:
    """Folder of a package that holds drawings."""
    return Path(package(name, "embedded", "data.name: families").__file__).parent


def _zipped(path: Path) -> Iterator[tuple[str, str]]:
    """Path without the ending, and text, of each SVG file of an archive."""
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith(".svg"):
                yield name.removesuffix(".svg"), archive.read(name).decode()


def _fontawesome() -> Iterator[tuple[str, Icon]]:
    icons = loads((_folder("faicons") / "icons.json").read_text(encoding="utf-8"))
    for name, icon in icons.items():
        if "solid" in icon["svg"]:  # the regular style has 163 icons, and brands are names that describe no drawing
            yield f"fontawesome/{name}", Icon(icon["svg"]["solid"]["raw"])


def _lucide() -> Iterator[tuple[str, Icon]]:
    place, terms = (_folder("lucide") / "data" / "lucide-icons.db").as_uri(), defaultdict[str, list[str]](list)
    with closing(sqlite3.connect(f"{place}?mode=ro&immutable=1", uri=True)) as database:
        for name, term in database.execute("SELECT name, tag FROM icon_tags ORDER BY name, tag"):
            terms[name].append(term.replace("-", " "))
        for name, svg in database.execute("SELECT name, svg FROM icons"):
            yield f"lucide/{name}", Icon(svg, tuple(terms[name]))


def _mdi() -> Iterator[tuple[str, Icon]]:
    for name, svg in _zipped(_folder("justmyresource_mdi") / "icons.zip"):
        yield f"mdi-{'outline' if 'outline' in name.split('-') else 'filled'}/{name}", Icon(svg)


def _phosphor() -> Iterator[tuple[str, Icon]]:
    for path, svg in _zipped(_folder("justmyresource_phosphor") / "icons.zip"):
        weight, name = path.split("/")
        if weight in ("duotone", "thin"):  # of six weights, all of the same icons
            yield f"phosphor-{weight}/{name.removesuffix(f'-{weight}')}", Icon(svg)


def _tabler() -> Iterator[tuple[str, Icon]]:
    for path, svg in _zipped(_folder("tablericons") / "tablericons.zip"):
        yield f"tabler-{path}", Icon(svg)  # in the folders filled and outline


@functools.cache
def icons() -> Mapping[str, Icon]:
    """All drawings of the packages by key.

    Raises:
        InputError: a package is not installed.
    """
    return dict(chain(_fontawesome(), _lucide(), _mdi(), _phosphor(), _tabler()))


def render(key: str, size: int = 224) -> Pixels:
    """Render one icon on a white background, uint8 [size, size, 3]; ``size`` is 1 to 4096 pixels.

    Raises:
        InputError: a package is missing, there is no icon of this key, or the size is out of range.
    """
    icon = icons().get(key)
    if icon is None:
        raise InputError("families: key", key, "the key of an item of load_items()")
    return drawn(icon.svg, size, "families")


# --- items ----------------------------------------------------------------------------------------------------------


def words_of(name: str) -> list[str]:
    """A name's words without numbers and words of style: ``battery-2-filled`` has ``battery``."""
    return [word for word in name.replace(" ", "-").split("-") if not word.isdigit() and word not in _STYLE_WORDS]


def concept_of(name: str) -> str:
    """The concept of a name, the same for ``circle-arrow-left`` and ``arrow-left-circle``; empty if none is left."""
    return " ".join(sorted(words_of(name.lower())))


def split_of(concept: str) -> Split:
    """The split of a concept, from a hash of it."""
    fraction = seeds.derive(_SEED, "families", "split", concept) / 2**63
    return "train" if fraction < TRAIN_BELOW else "val" if fraction < VAL_BELOW else "test"


def _kept(keys: Iterable[str]) -> dict[str, list[str]]:
    """Keys of the icons that the set holds, by concept, out of the keys of all drawings."""
    drawn_by = defaultdict[str, dict[str, str]](dict)
    # Of several drawings of a concept in one style the one with the shortest name: trash, not trash-2.
    for key in sorted(keys, key=lambda key: (len(key), key)):
        style, name = key.split("/")
        drawn_by[concept_of(name)].setdefault(style, key)
    kept = {}
    for concept, by_style in sorted(drawn_by.items()):
        if concept and len({family_of(style) for style in by_style}) > 1:
            kept[concept] = list(by_style.values())
            if split_of(concept) != "train":
                kept[concept] = [min(kept[concept], key=lambda key: seeds.derive(_SEED, "families", "drawing", key))]
    return kept


@functools.cache
def load_items() -> list[Item]:
    """All items, sorted by key: about 4,100, of 1,000 concepts for training, 170 for validation and 490 for testing.

    A search term that is itself a concept of another split is left out. A caption that fits several concepts is dropped
    from all of them, unless it is the name.

    Raises:
        InputError: a package is not installed.
    """
    found, users, items = icons(), defaultdict[str, set[str]](set), []
    kept = _kept(found)
    for concept, keys in kept.items():
        split = split_of(concept)
        for key in keys:
            style, name = key.split("/")
            meant = [(term, concept_of(term)) for term in found[key].terms]
            terms = [term for term, other in meant if other not in kept or split_of(other) == split]
            captions = caption_candidates([" ".join(words_of(name))], terms, "icon")
            items.append(Item(key, style, concept, tuple(captions), split))
            for caption in captions:
                users[caption.lower()].add(concept)
    uses = {caption: len(concepts) for caption, concepts in users.items()}
    items.sort(key=lambda item: item.key)
    return [replace(item, captions=kept_captions(item.captions, uses)) for item in items]


def read_families(data: Data) -> RawSet:
    """Read the set, with the column that the partition names; it has no labels, as the families share none.

    Raises:
        InputError: as :func:`load_items`.
    """
    items = load_items()
    columns = {"style": tuple(item.style for item in items), "family": tuple(item.family for item in items)}
    return checked(
        RawSet(
            place="families",
            keys=tuple(item.key for item in items),
            images=Drawings(tuple(item.key for item in items), place="families", draw=render, packages=_PACKAGES),
            captions=tuple(item.captions for item in items),
            split=np.array([SPLITS.index(item.split) for item in items], dtype=np.uint8),
            column=None if data.column is None else columns[data.column],
        )
    )
