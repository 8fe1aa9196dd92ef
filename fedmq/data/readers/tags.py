"""Read MIRFlickr-25K and NUS-WIDE as distributed: photos with user tags, and label lists.

The tags are the text: a bag of words for hashing methods, or joined to one caption for a sentence encoder.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedmq.config.scenario import Data
from fedmq.data.raw_set import U8, RawSet, checked, first_existing, folder_of, is_number, read_text
from fedmq.data.readers.arrays import holds_pixels, read_pixels
from fedmq.encoders.image_sets import ImageFiles, is_leftover
from fedmq.errors import InputError
from fedmq.storage.regular_files import open_regular

#: Number of NUS-WIDE's 81 labels to keep, the most frequent ones, as in DCMH.
NUS_LABELS = 21


def _bags(tags: Sequence[Sequence[str]], vocabulary: Sequence[str]) -> U8:
    """Bags of words: 0/1 uint8 [n, V] over the vocabulary."""
    column = {word: index for index, word in enumerate(vocabulary)}
    bag = np.zeros((len(tags), len(vocabulary)), dtype=np.uint8)
    for row, words in enumerate(tags):
        bag[row, [column[word] for word in words]] = 1
    return bag


def _named(words: Sequence[str]) -> tuple[str, ...]:
    """A vocabulary as :class:`RawSet` has it; none if a word is listed twice."""
    return tuple(words) if len(set(words)) == len(words) else ()


def read_mirflickr(data: Data) -> RawSet:
    """Read MIRFlickr-25K, as distributed or as arrays of pixels, tags and labels.

    Raises:
        InputError: as :func:`mirflickr_photos` and ``arrays.read_pixels``.
    """
    return read_pixels(data) if holds_pixels(data) else mirflickr_photos(data)


def read_nuswide(data: Data) -> RawSet:
    """Read NUS-WIDE-21, as distributed or as arrays of pixels, tags and labels.

    Raises:
        InputError: as :func:`nuswide_photos` and ``arrays.read_pixels``.
    """
    return read_pixels(data) if holds_pixels(data) else nuswide_photos(data)


def mirflickr_photos(data: Data) -> RawSet:
    """Read MIRFlickr-25K (Huiskes and Lew 2008) as distributed.

    Files: ``im<N>.jpg``, ``meta/tags/tags<N>.txt``, ``doc/common_tags.txt`` (1,386 tags that occur at least 20 times),
    ``annotations`` or ``mirflickr25k_annotations_v080``: one file of image numbers for each of the 24 labels; the
    stricter ``_r1`` files are not used. Items without a common tag or without a label are skipped, which leaves 20,015
    (DCMH).

    Raises:
        InputError: a folder or file is missing or empty, or a label file holds no numbers.
    """
    folder = folder_of(data)
    inner = first_existing([folder / "mirflickr", folder / "mirflickr25k", folder], "data.path", "folder of images")
    root = data.images or inner
    vocabulary = [line.split()[0] for line in read_text(inner / "doc" / "common_tags.txt").splitlines() if line.split()]
    if not (known := set(vocabulary)):
        raise InputError(str(inner / "doc" / "common_tags.txt"), "no tag", "one common tag per line, 1,386 in all")
    places = [
        parent / name
        for parent in (folder, inner)
        for name in ("mirflickr25k_annotations_v080", "annotations", "mirflickr25k_annotations")
    ]
    notes = data.annotations or first_existing(places, "data.annotations", "folder of label files")
    numbered = {}
    for path in (inner / "meta" / "tags").glob("tags*.txt"):
        if found := re.fullmatch(r"tags(\d+)", path.stem):
            # In file order, without duplicates.
            tags_of_image = list(dict.fromkeys(word for word in read_text(path).split() if word in known))
            if tags_of_image:
                numbered[int(found[1])] = tags_of_image
    if not numbered:
        raise InputError(str(inner / "meta" / "tags"), "no tagsN.txt with a common tag", "one such file for each image")
    numbers = sorted(numbered)
    row = {number: index for index, number in enumerate(numbers)}
    files = sorted(path for path in notes.glob("*.txt") if not is_leftover(path.name))
    files = [path for path in files if not path.stem.endswith("_r1") and path.stem.lower() != "readme"]
    if not files:
        raise InputError(str(notes), "no label file", "one file of image numbers for each of the 24 labels")
    labels = np.zeros((len(numbers), len(files)), dtype=np.uint8)
    for column, path in enumerate(files):
        for line in read_text(path).split():
            if not is_number(line):
                raise InputError(str(path), line, "numbers of images, one per line")
            if int(line) in row:
                labels[row[int(line)], column] = 1
    kept = np.flatnonzero(labels.any(axis=1))
    numbers, labels = [numbers[row] for row in kept], labels[kept]
    tags = [numbered[number] for number in numbers]
    return checked(
        RawSet(
            place=str(inner),
            keys=tuple(f"im{number}" for number in numbers),
            images=ImageFiles(tuple(root / f"im{number}.jpg" for number in numbers)),
            captions=tuple((" ".join(words),) for words in tags),
            bag=_bags(tags, vocabulary),
            vocabulary=_named(vocabulary),
            labels=labels,
            label_names=tuple(path.stem for path in files),
        )
    )


def _digits(path: Path, width: int | None) -> U8:
    """Read a file of lines of 0/1 digits, with or without separators: uint8 [lines, width]."""
    rows = []
    try:
        with open_regular(path, "a file of the data set") as file:
            for number, line in enumerate(file, 1):
                # Splitting half a million lines of a thousand digits would take minutes.
                digits = np.frombuffer(line.translate(None, b" \t\r\n"), dtype=np.uint8) - ord("0")
                width = len(digits) if width is None else width
                if not len(digits):
                    continue
                if len(digits) != width:
                    raise InputError(f"{path}: line {number}", f"{len(digits)} digits", f"{width}, each 0 or 1")
                if digits.max() > 1:
                    wrong = chr(int(digits[digits > 1][0] + np.uint8(ord("0"))))
                    raise InputError(f"{path}: line {number}", wrong, "0 or 1")
                rows.append(digits)
    except OSError as error:
        raise InputError(str(path), error.strerror or str(error), "a file of the data set") from None
    return np.stack(rows) if rows else np.zeros((0, width or 0), dtype=np.uint8)


def _first(folder: Path, *names: str) -> Path:
    return first_existing([folder / name for name in names], "data.path", names[0].rpartition("/")[2])


def nuswide_photos(data: Data) -> RawSet:
    """Read NUS-WIDE (Chua et al. 2009) as distributed, with its 21 most frequent labels.

    Files: ``ImageList/Imagelist.txt``, ``NUS_WID_Tags/AllTags1k.txt`` (and ``TagList1k.txt``),
    ``Groundtruth/AllLabels/Labels_*.txt``, and the images below ``Flickr``. Items without any of the 21 labels are
    skipped, which leaves 195,834 (DCMH).

    Raises:
        InputError: a folder or file is missing or malformed, or two files differ in their number of items.
    """
    folder = folder_of(data)
    listed = _first(folder, "ImageList/Imagelist.txt", "ImageList/ImageList.txt", "Imagelist.txt")
    # The list has Windows path separators.
    names = [line.strip().replace("\\", "/") for line in read_text(listed, "latin-1").splitlines() if line.strip()]
    notes = data.annotations or folder
    inner = [notes / "Groundtruth" / "AllLabels", notes / "AllLabels", *([notes] if data.annotations else [])]
    files = sorted(first_existing(inner, "data.annotations", "AllLabels").glob("Labels_*.txt"))
    if not files:
        raise InputError(str(notes), "no Labels_*.txt in AllLabels", "one file of 0 and 1 for each label")
    columns = [_digits(path, 1)[:, 0] for path in files]
    tags_path = _first(folder, "NUS_WID_Tags/AllTags1k.txt", "Tags/AllTags1k.txt", "AllTags1k.txt")
    bag = _digits(tags_path, None)
    for path, found in (*zip(files, map(len, columns), strict=True), (tags_path, len(bag))):
        if found != len(names):
            raise InputError(str(path), f"{found} lines", f"{len(names)}, as {listed.name} has")
    # The most frequent labels (ties by name), in name order.
    top = sorted(sorted(range(len(files)), key=lambda index: (-int(columns[index].sum()), index))[:NUS_LABELS])
    labels = np.stack([columns[index] for index in top], axis=1)
    kept = np.flatnonzero(labels.any(axis=1))
    words_path = tags_path.with_name("TagList1k.txt")
    words = read_text(words_path).split() if words_path.is_file() else [f"tag{i}" for i in range(bag.shape[1])]
    if len(words) != bag.shape[1]:
        raise InputError(str(words_path), f"{len(words)} tags", f"{bag.shape[1]}, as {tags_path.name} has columns")
    root = data.images or first_existing(
        [folder / name for name in ("Flickr", "images", "image")], "data.images", "images"
    )
    return checked(
        RawSet(
            place=str(listed),
            keys=tuple(names[row] for row in kept),
            images=ImageFiles(tuple(root / names[row] for row in kept)),
            captions=tuple(
                (" ".join(words[column] for column in np.flatnonzero(bag[row])),) if bag[row].any() else ()
                for row in kept
            ),
            bag=bag[kept],
            vocabulary=_named(words),
            labels=labels[kept],
            label_names=tuple(files[index].stem.removeprefix("Labels_") for index in top),
        )
    )
