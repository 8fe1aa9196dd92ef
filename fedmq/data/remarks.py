"""Remarks on a data set: counts of what is allowed but probably unintended, made while it is prepared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmq.data.duplicates import same_rows
from fedmq.data.label_levels import fine_columns
from fedmq.data.splits import SPLITS
from fedmq.storage.json_files import Stored
from fedmq.text import counted, first_few


class Remarks(Stored):
    """Counts of what is allowed but probably unintended.

    Args:
        padding: rows of zeros after an item's captions, which were treated as padding.
        merged: rows of a file of features whose image equals an earlier row's: their captions joined that item.
        zero_images: items with an image vector of zeros.
        zero_texts: captions with a vector of zeros.
        same_images: items whose image vector equals an earlier item's.
        same_texts: captions whose vector equals a caption's of an earlier item.
        known: items of val and test whose image vector equals a training item's.
        placeholders: captions such as ``None`` or ``N/A``, which often stand for a missing value.
        cut: captions that are longer than the text encoder reads.
        first_cut: key of the first item with such a caption.
    """

    padding: int = 0
    merged: int = 0
    zero_images: int = 0
    zero_texts: int = 0
    same_images: int = 0
    same_texts: int = 0
    known: int = 0
    placeholders: int = 0
    cut: int = 0
    first_cut: str = ""


#: Texts, in lower case, with which spreadsheets, databases and programs write a missing value.
_MISSING = frozenset(("none", "null", "nan", "<na>", "n/a", "na", "#n/a", "nil", "-", "?"))
#: For a data set without remarks.
NOTHING = Remarks()


def of_vectors(
    image: npt.NDArray[Any],
    text: npt.NDArray[Any],
    counts: npt.NDArray[np.int64],
    present: npt.NDArray[np.bool_] | None = None,
    split: npt.NDArray[np.uint8] | None = None,
) -> Remarks:
    """Counts of zeros and of equal vectors.

    Args:
        image: [n, ...] image inputs; of pixels nothing is counted.
        text: [N, ...] captions of all items one after the other, one row for an item without captions.
        counts: int64 [n], number of captions of each item.
        present: bool [n, 2], whether each item has an image and captions; None if all have.
        split: uint8 [n], indices into ``SPLITS``; None counts nothing over splits.
    """
    held = np.repeat(counts > 0, np.maximum(counts, 1))
    owner = np.repeat(np.arange(len(counts)), np.maximum(counts, 1))
    some = np.array([bool(row.any()) for row in text])
    found = Remarks(zero_texts=int((~some & held).sum()), same_texts=int((owner[same_rows(text)] < owner).sum()))
    if image.ndim > 2:
        return found
    blank = np.array([not row.any() for row in image])
    zero = int((blank if present is None else blank & present[:, 0]).sum())
    first = same_rows(image)
    same, known = int((first < np.arange(len(image))).sum()), 0
    if split is not None:
        train, *heldout = (SPLITS.index(name) for name in ("train", "val", "test"))
        known = int((np.isin(split, heldout) & np.isin(first, first[split == train])).sum())
    return found.model_copy(update={"zero_images": zero, "same_images": same, "known": known})


def sentences(remarks: Remarks, *, equal: bool = True, known: bool = True) -> list[str]:
    """One line for each count that is not 0.

    Args:
        remarks: remarks on a data set.
        equal: also report equal vectors, which many data sets have.
        known: also report the number of held-out items with the image of a training item.
    """
    heldout = "item of val and test has", "items of val and test have"
    placeholder = "caption says", "captions say"
    cut = f"as the text encoder reads only the beginning; first: {remarks.first_cut}"
    notes = (
        (remarks.padding, ("row of zeros", "rows of zeros"), "after the captions treated as padding"),
        (remarks.merged, ("row", "rows"), "with the image of an earlier row read as captions of one item"),
        (remarks.zero_images, ("image vector is", "image vectors are"), "zero"),
        (remarks.zero_texts, ("caption vector is", "caption vectors are"), "zero"),
        (remarks.same_images * equal, ("image vector equals", "image vectors equal"), "that of an earlier item"),
        (remarks.same_texts * equal, ("caption vector equals", "caption vectors equal"), "one of an earlier item"),
        (remarks.known * known, heldout, "the image vector of a training item"),
        (remarks.placeholders, placeholder, "None, N/A or the like, which often stands for a missing value"),
        (remarks.cut, ("caption was cut,", "captions were cut,"), cut),
    )
    return [f"{count:,} {one if count == 1 else many} {rest}" for count, (one, many), rest in notes if count]


def is_placeholder(text: str) -> bool:
    """Whether a caption or label is a text that often stands for a missing value."""
    return text.strip().lower() in _MISSING


def of_labels(counts: Mapping[str, int], items: int) -> list[str]:
    """One line for each property of labels that is probably unintended.

    Args:
        counts: number of items of each label.
        items: number of items.
    """
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
    alike = defaultdict[str, list[str]](list)
    for name in fine:
        alike[name.casefold()].append(name)
    lines += [f"{len(same)} labels differ only in case: {first_few(same)}" for same in alike.values() if len(same) > 1]
    if missing := [name for name in fine if is_placeholder(name) and counts[name]]:
        held = sum(counts[name] for name in missing)
        lines.append(
            f"{counted(held, 'item')} with a label that often stands for a missing value: {first_few(missing)}"
        )
    return lines
