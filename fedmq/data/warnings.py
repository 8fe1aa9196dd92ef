"""Warnings about a data set: counts of what is allowed but probably unintended, made while it is prepared."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmq.data.labels import fine_columns
from fedmq.data.splits import SPLITS, nearly_equal, same_rows
from fedmq.storage.json_files import Stored
from fedmq.text import counted, first_few


class DataWarnings(Stored):
    """Counts of what is allowed but probably unintended."""

    padding: int = 0  # rows of zeros after an item's captions, which were treated as padding
    merged: int = 0  # rows of a file of features whose image equals an earlier row's: their captions joined that item
    zero_images: int = 0  # items with an image vector of zeros
    zero_texts: int = 0  # captions with a vector of zeros
    same_images: int = 0  # items whose image, i.e. its vector or its pixels, equals an earlier item's.
    same_texts: int = 0  # captions whose vector equals a caption's of an earlier item
    known: int = 0  # items of val and test whose image equals a training item's
    public: int = 0  # further items of val and test whose image equals a public item's, on which some methods train
    near: int = 0  # further items of val and test whose image vector is nearly a training item's
    tested: int = 0  # items of test
    repeated: int = 0  # items of test whose image is, or is nearly, that of another item of test counted before
    copies: int = 0  # captions whose vector equals the image vector of their item
    placeholders: int = 0  # captions such as ``None`` or ``N/A``, which often stand for a missing value
    file_names: int = 0  # captions that end like the name of an image file
    garbled: int = 0  # captions with characters that a wrong encoding left, such as ``Ã©`` for ``é``
    markup: int = 0  # captions with tags or character references of HTML
    cut: int = 0  # captions that are longer than the text encoder reads
    first_cut: str = ""  # key of the first item with such a caption


#: Texts, in lower case, with which spreadsheets, databases and programs write a missing value.
_MISSING = frozenset(("none", "null", "nan", "<na>", "n/a", "na", "#n/a", "nil", "-", "?"))
_FILE_NAME = re.compile(r"\.(?:jpe?g|png|gif|bmp|webp|tiff?|dcm)\s*\Z", re.IGNORECASE)
#: What UTF-8 becomes if it is read as Latin-1 or Windows-1252, and the sign for what could not be read at all.
_GARBLED = re.compile(
    "[ÂÃ][\u0080-\u00aa\u00ac-\u00ba\u00bc-\u00bf€ƒ„†‡‰ŠŒŽšœžŸ]|(?<![A-ZÀ-Þ])[ÂÃ][…“”‘’•–—˜™«»]"
    "|â[€‚„†‡]|ðŸ|ï»¿|[\u0080-\u0084\u0086-\u009f\ufffd]"
)
_MARKUP = re.compile(
    r"&(?:amp|lt|gt|quot|apos|nbsp|#\d{1,7}|#x[0-9a-f]{1,6});|</?(?:p|br|b|i|em|strong|div|span|ul|li|a)(?:\s[^<>]*)?/?>",
    re.IGNORECASE,
)
#: What people write in different ways between the parts of a name; not between numbers, as in T1-2 and T12.
_BETWEEN_LETTERS = re.compile(r"(?<=[^\W\d])[\s_-]+(?=[^\W\d])")
#: Splits that models are evaluated on.
_HELD_OUT = ("val", "test")
#: Minimum number of held-out items for a remark on a label that all of them have: among few, that may be chance.
_SEVERAL = 5
#: For a data set without warnings.
NOTHING = DataWarnings()


def of_vectors(
    image: npt.NDArray[Any],
    text: npt.NDArray[Any],
    counts: npt.NDArray[np.int64],
    present: npt.NDArray[np.bool_] | None = None,
    split: npt.NDArray[np.uint8] | None = None,
) -> DataWarnings:
    """Counts of zeros and of equal vectors or pixels; pixels are neither zero nor nearly equal.

    Args:
        image: [n, ...] image inputs.
        text: [N, ...] captions of all items one after the other, one row for an item without captions.
        counts: int64 [n], number of captions of each item.
        present: bool [n, 2], whether each item has an image and captions; None if all have.
        split: uint8 [n], indices into ``SPLITS``; None counts nothing over splits.
    """
    held = np.repeat(counts > 0, np.maximum(counts, 1))
    owner = np.repeat(np.arange(len(counts)), np.maximum(counts, 1))
    some = np.array([bool(row.any()) for row in text])
    found = DataWarnings(zero_texts=int((~some & held).sum()), same_texts=int((owner[same_rows(text)] < owner).sum()))
    first, blank = same_rows(image), np.array([not row.any() for row in image])
    more, distinct = of_equal_images(first, ~blank, split)
    found = found.model_copy(update=more)
    if image.ndim > 2:
        return found
    more = {"zero_images": int((blank if present is None else blank & present[:, 0]).sum())}
    if split is not None:
        training = split == SPLITS.index("train")
        others = np.isin(split, [SPLITS.index(name) for name in _HELD_OUT]) & ~np.isin(first, first[training])
        more["near"] = int(nearly_equal(image[others], image[training]).sum())
        more["repeated"] = found.repeated + int(nearly_equal(image[distinct]).sum())
    if image.shape[1:] == text.shape[1:]:
        same = (bool(row.any()) and np.array_equal(row, image[at]) for row, at in zip(text, owner, strict=True))
        more["copies"] = sum(same)
    return found.model_copy(update=more)


def of_equal_images(
    first: npt.NDArray[np.int64], held: npt.NDArray[np.bool_], split: npt.NDArray[np.uint8] | None
) -> tuple[dict[str, int], npt.NDArray[np.int64]]:
    """Counts of equal images, by the names of the fields of :class:`DataWarnings`, and the different ones of test.

    ``first`` int64 [n] is the first item with the same image as each item, ``held`` bool [n] says which have an image,
    and the split is as in :func:`of_vectors`.
    """
    counts = {"same_images": int((first < np.arange(len(first))).sum())}
    if split is None:
        return counts, np.zeros(0, np.int64)
    heldout = np.isin(split, [SPLITS.index(name) for name in _HELD_OUT])
    trained, public = (np.isin(first, first[split == SPLITS.index(name)]) for name in ("train", "public"))
    rows = np.flatnonzero((split == SPLITS.index("test")) & held)
    distinct: npt.NDArray[np.int64] = rows[np.unique(first[rows], return_index=True)[1]]
    counts |= {"known": int((heldout & trained).sum()), "public": int((heldout & public & ~trained).sum())}
    return counts | {"tested": len(rows), "repeated": len(rows) - len(distinct)}, distinct


def of_captions(captions: Iterable[str]) -> dict[str, int]:
    """Counts of captions that are probably no sentences, by the names of the fields of :class:`DataWarnings`."""
    kinds: dict[str, Callable[[str], object]] = {"placeholders": is_placeholder, "file_names": _FILE_NAME.search}
    kinds |= {"garbled": _GARBLED.search, "markup": _MARKUP.search}
    counts = dict.fromkeys(kinds, 0)
    for caption in captions:
        for name, holds in kinds.items():
            counts[name] += bool(holds(caption))
    return counts


def sentences(warnings: DataWarnings, *, known: bool = True) -> list[str]:
    """One line for each count that is not 0; without ``known``, not for images that are also of training items."""
    heldout = "item of val and test has", "items of val and test have"
    placeholder, holds = ("caption says", "captions say"), ("caption has", "captions have")
    most = 1 - warnings.repeated / max(1, warnings.tested)
    of = f"of {warnings.tested:,} test items"
    again = (
        f"the image of another one, as each is an item of its own: from image to text, R@1 can reach at most {most:.2f}"
    )
    cut = f"as the text encoder reads only the beginning; first: {warnings.first_cut}"
    notes = (
        (warnings.padding, ("row of zeros", "rows of zeros"), "after the captions treated as padding"),
        (warnings.merged, ("row", "rows"), "with the image of an earlier row read as captions of one item"),
        (warnings.zero_images, ("image vector is", "image vectors are"), "zero"),
        (warnings.zero_texts, ("caption vector is", "caption vectors are"), "zero"),
        (warnings.repeated, (f"{of} has", f"{of} have"), again),
        (warnings.same_images, ("image equals", "images equal"), "that of an earlier item"),
        (warnings.same_texts, ("caption vector equals", "caption vectors equal"), "one of an earlier item"),
        (warnings.known * known, heldout, "the image of a training item"),
        (warnings.public, heldout, "the image of a public item"),
        (warnings.near, heldout, "nearly the image vector of a training item, like one image that was encoded twice"),
        (warnings.copies, ("caption vector equals", "caption vectors equal"), "the image vector of the same item"),
        (warnings.placeholders, placeholder, "None, N/A or the like, which often stands for a missing value"),
        (warnings.file_names, ("caption ends", "captions end"), "like the name of an image file"),
        (warnings.garbled, holds, "characters such as Ã© or \ufffd, the traces of a wrong encoding"),
        (warnings.markup, holds, "HTML in it, such as &amp; or <br>"),
        (warnings.cut, ("caption was cut,", "captions were cut,"), cut),
    )
    return [f"{count:,} {one if count == 1 else many} {rest}" for count, (one, many), rest in notes if count]


def is_placeholder(text: str) -> bool:
    """Whether a caption or label is a text that often stands for a missing value."""
    return text.strip().lower() in _MISSING


def of_labels(counts: Mapping[str, int], items: int) -> list[str]:
    """One line for each property of labels that is probably unintended."""
    names = list(counts)
    fine = [names[column] for column in fine_columns(names)]
    lines = [
        f"every item has the label {name}, so each item is relevant to all others"
        for name in fine
        if counts[name] == items
    ]
    if unused := [name for name in fine if counts[name] == 0]:
        lines.append(f"{len(unused)} of {len(fine)} labels have no item: {first_few(unused)}")
    if items > 1 and max((counts[name] for name in fine), default=0) == 1:
        lines.append("no label has two items, so only an item's own texts are relevant to it")
    lines += of_spellings(fine)
    if missing := [name for name in fine if is_placeholder(name) and counts[name]]:
        held = sum(counts[name] for name in missing)
        lines.append(
            f"{counted(held, 'item')} with a label that often stands for a missing value: {first_few(missing)}"
        )
    return lines


def of_spellings(names: Iterable[str], what: str = "labels") -> list[str]:
    """One line for names of ``what`` that probably mean the same: ``X-ray`` and ``x ray``, or an ``é`` in two forms."""
    alike = defaultdict[str, list[str]](list)
    for name in names:
        folded = unicodedata.normalize("NFKC", name).casefold().strip(" .")
        alike[_BETWEEN_LETTERS.sub("", folded)].append(name)
    return [
        f"{len(same)} {what} differ only in spelling: {first_few(same)}" for same in alike.values() if len(same) > 1
    ]


def of_heldout_labels(
    labels: npt.NDArray[np.uint8] | None, names: Sequence[str], split: npt.NDArray[np.uint8]
) -> list[str]:
    """One line for each held-out split in which labels distinguish no items, so that figures such as mAP mean nothing.

    Args:
        labels: multi-hot [n, L], or None.
        names: the L names.
        split: uint8 [n], indices into ``SPLITS``.
    """
    fine, lines = fine_columns(names), list[str]()
    if labels is None or not np.asarray(labels)[:, fine].any():
        return lines
    for name in _HELD_OUT:
        queries = np.asarray(labels)[split == SPLITS.index(name)][:, fine]
        if len(queries) and not queries.any():
            lines.append(f"no item of {name} has a label, so no item is relevant to another one there")
        shared = queries.all(axis=0) & ~np.asarray(labels)[:, fine].all(axis=0)
        if len(queries) >= _SEVERAL and shared.any():
            label = names[fine[int(np.flatnonzero(shared)[0])]]
            lines.append(f"every item of {name} has the label {label}, so each is relevant to all others there")
    return lines
