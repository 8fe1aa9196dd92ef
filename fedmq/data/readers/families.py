"""Icons of five families from Python packages: an embedded data set with natural silos.

A silo is one style of one family, with its own way of drawing and its own names: Font Awesome, Lucide, Material Design
Icons in two styles, Phosphor in two, Tabler in two. No encoder or head of the ``lite`` backbone was trained on their
drawings. ``docs/reference/embedded_data.md`` lists packages and licences.

A concept is the set of words in a name, without numbers and words for a style. The set holds the concepts that at least
two families draw, with at most one icon per style. Concepts, not icons, are split, so that no family trains on a
concept of ``val`` or ``test``. Each of these has a single icon, of one style, so that a name fits only one image.
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
from fedmq.data.readers.openmoji import Drawings, Split, caption_candidates, kept_captions, render_svg
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
    """One icon as its package has it."""

    svg: str  # the text of its SVG file
    terms: tuple[str, ...] = ()  # the family's search terms, if its package has them


@dataclass(frozen=True)
class Item:
    """One icon of the data set."""

    key: str  # ``STYLE/NAME``, e.g. ``"tabler-outline/dog-bowl"``.
    style: str  # family and style, e.g. ``"tabler-outline"``.
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
    """Folder of a package that holds icons."""
    return Path(package(name, "embedded", "data.name: families").__file__).parent


def _zipped(path: Path) -> Iterator[tuple[str, str]]:
    """Path without ``.svg``, and text, of each SVG file in an archive."""
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith(".svg"):
                yield name.removesuffix(".svg"), archive.read(name).decode()


def _fontawesome() -> Iterator[tuple[str, Icon]]:
    icons = loads((_folder("faicons") / "icons.json").read_text(encoding="utf-8"))
    for name, icon in icons.items():
        # The regular style has only 163 icons, and the name of a brand does not say what its icon shows.
        if "solid" in icon["svg"]:
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
        if weight in ("duotone", "thin"):  # two of six weights, which all draw the same icons
            yield f"phosphor-{weight}/{name.removesuffix(f'-{weight}')}", Icon(svg)


def _tabler() -> Iterator[tuple[str, Icon]]:
    for path, svg in _zipped(_folder("tablericons") / "tablericons.zip"):
        yield f"tabler-{path}", Icon(svg)  # in the folders filled and outline


@functools.cache
def icons() -> Mapping[str, Icon]:
    """All icons of the packages, by key.

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
    return render_svg(icon.svg, size, "families")


# --- items ----------------------------------------------------------------------------------------------------------


def words_of(name: str) -> list[str]:
    """The words of a name without numbers and words for a style: ``["battery"]`` of ``battery-2-filled``."""
    return [word for word in name.replace(" ", "-").split("-") if not word.isdigit() and word not in _STYLE_WORDS]


def concept_of(name: str) -> str:
    """The concept of a name, the same for ``circle-arrow-left`` and ``arrow-left-circle``; empty without any words."""
    return " ".join(sorted(words_of(name.lower())))


def split_of(concept: str) -> Split:
    """The split of a concept, from a hash of it."""
    fraction = seeds.derive(_SEED, "families", "split", concept) / 2**63
    return "train" if fraction < TRAIN_BELOW else "val" if fraction < VAL_BELOW else "test"


def _chosen(keys: Iterable[str]) -> dict[str, list[str]]:
    """Keys of the set's icons by concept, chosen from the keys of all icons."""
    drawn_by = defaultdict[str, dict[str, str]](dict)
    # If a style has several icons of a concept, the one with the shortest name is taken: trash, not trash-2.
    for key in sorted(keys, key=lambda key: (len(key), key)):
        style, name = key.split("/")
        drawn_by[concept_of(name)].setdefault(style, key)
    chosen = {}
    for concept, by_style in sorted(drawn_by.items()):
        if concept and len({family_of(style) for style in by_style}) > 1:
            chosen[concept] = list(by_style.values())
            if split_of(concept) != "train":
                first = min(by_style.values(), key=lambda key: seeds.derive(_SEED, "families", "drawing", key))
                chosen[concept] = [first]
    return chosen


@functools.cache
def load_items() -> list[Item]:
    """All items, sorted by key: about 4,100, of 1,000 concepts for training, 170 for validation and 490 for testing.

    A search term that is a concept of another split is left out. A caption that fits several concepts is left out of
    all of them, unless it is the name.

    Raises:
        InputError: a package is not installed.
    """
    found, users, items = icons(), defaultdict[str, set[str]](set), []
    chosen = _chosen(found)
    for concept, keys in chosen.items():
        split = split_of(concept)
        for key in keys:
            style, name = key.split("/")
            meanings = [(term, concept_of(term)) for term in found[key].terms]
            terms = [term for term, other in meanings if other not in chosen or split_of(other) == split]
            captions = caption_candidates([" ".join(words_of(name))], terms, "icon")
            items.append(Item(key, style, concept, tuple(captions), split))
            for caption in captions:
                users[caption.lower()].add(concept)
    uses = {caption: len(concepts) for caption, concepts in users.items()}
    items.sort(key=lambda item: item.key)
    return [replace(item, captions=kept_captions(item.captions, uses)) for item in items]


def read_families(data: Data) -> RawSet:
    """Read the set with the column that ``partition.column`` names; it has no labels, as the families share none.

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
