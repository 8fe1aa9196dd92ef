"""Read data sets in the folders in which they are distributed.

IAPR TC-12, Wikipedia and Pascal Sentence have a text file for each item; MIRFlickr-25K and NUS-WIDE have tags of users
and lists of labels. Tags are the text: a bag of words for hashing methods, or one caption for a sentence encoder.
"""

from __future__ import annotations

import html
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedmq.config.scenario import Data
from fedmq.data.raw_set import U8, RawSet, checked, first_existing, folder_of, is_number, multi_hot, read_text
from fedmq.data.splits import SPLITS
from fedmq.encoders.image_sets import ImageFiles, exists, files_below, is_leftover
from fedmq.encoders.images import IMAGE_ENDINGS
from fedmq.errors import InputError
from fedmq.storage import quarantine
from fedmq.storage.regular_files import open_regular

WIKIPEDIA_CLASSES = (
    "art", "biology", "geography", "history", "literature", "media", "music", "royalty", "sport", "warfare"
)  # fmt: skip
WIKIPEDIA_LISTS = {"train": "trainset_txt_img_cat.list", "test": "testset_txt_img_cat.list"}


def plain(marked: str) -> str:
    """Remove tags and decode entities; an XML parser would fail, as the files are not always valid XML."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", marked))).strip()


def element(text: str, name: str) -> str:
    """Plain text of the first ``<name>`` element; empty if there is none."""
    match = re.search(rf"<{name}>(.*?)</{name}>", text, flags=re.DOTALL | re.IGNORECASE)
    return plain(match[1]) if match else ""


# --- IAPR TC-12 -----------------------------------------------------------------------------------------------------


def _regions(folder: Path) -> dict[str, set[str]]:
    """Label names by image number, from the SAIAPR annotations if present.

    Each folder's ``labels.txt`` has lines of image, region and label number; ``wlist.txt`` maps label numbers to names.
    """
    names: dict[str, str] = {}
    lists = [path for path in sorted(files_below(folder)) if path.name in ("wlist.txt", "labels.txt")]
    for path in (path for path in lists if path.name == "wlist.txt"):
        lines = (line.split(maxsplit=1) for line in read_text(path).splitlines())
        names.update((parts[0], parts[1]) for parts in lines if len(parts) == 2)
    labels: dict[str, set[str]] = defaultdict(set)
    for path in (path for path in lists if path.name == "labels.txt"):
        for number, line in enumerate(read_text(path).splitlines(), 1):
            parts = line.split()
            if parts and (len(parts) < 3 or not is_number(parts[2])):
                raise InputError(f"{path}: line {number}", line, "image, region and label number")
            if parts:
                labels[parts[0]].add(names.get(parts[2], f"label-{int(parts[2]):03d}").strip())
    return labels


def _read_western(path: Path) -> str:
    """Read a text file in UTF-8 or in Windows-1252, the original encoding of IAPR TC-12."""
    # Accented Windows-1252 text is practically never valid UTF-8. Latin-1 covers the bytes that Windows-1252 lacks.
    for encoding in ("utf-8-sig", "cp1252"):
        try:
            return read_text(path, encoding)
        except InputError as error:
            if not isinstance(error.__context__, UnicodeDecodeError):
                raise
    return read_text(path, "latin-1")


def _iapr_image(images: Path, named: str) -> Path:
    """Path of an annotation's ``images/00/25.jpg``: below ``data.images``, with or without the folder ``images``."""
    path = Path(named)
    inside = images / (path.relative_to("images") if path.is_relative_to("images") else path)
    return images / path if not exists(inside) and exists(images / path) else inside


def read_iapr(data: Data) -> RawSet:
    """Read IAPR TC-12 (Grubinger et al. 2006): ``images/NN/N.jpg`` and ``annotations_complete_eng/NN/N.eng``.

    The only caption is the description, or the title if that is empty. The set has no official split.

    Raises:
        InputError: there are no annotations, or one names no image.
    """
    folder = folder_of(data)
    names = ("annotations_complete_eng", "iaprtc12/annotations_complete_eng", "annotations")
    notes = data.annotations or first_existing([folder / name for name in names], "data.path", "annotations")
    keys, paths, captions = [], [], []
    for path in sorted(path for path in files_below(notes) if path.suffix == ".eng"):
        text = _read_western(path)
        image = element(text, "IMAGE")
        if not image or Path(image).is_absolute() or ".." in Path(image).parts:
            raise InputError(f"{path}: IMAGE", image, "a path like images/00/25.jpg")
        caption = element(text, "DESCRIPTION") or element(text, "TITLE")
        keys.append(path.relative_to(notes).with_suffix("").as_posix())
        paths.append(_iapr_image(data.images, image) if data.images else notes.parent / image)
        captions.append((caption,) if caption else ())
    regions = _regions(folder)
    labels = [regions.get(Path(key).name, ()) for key in keys]
    return checked(RawSet(str(notes), tuple(keys), ImageFiles(tuple(paths)), tuple(captions)), labels)


# --- Wikipedia ------------------------------------------------------------------------------------------------------


def wikipedia_split(train: int, test: int) -> U8:
    """Split of the concatenated lists, uint8: the training list, then a third of the test list as val, then test.

    Source: MRL and DSCMR divide the 693 test pairs into 231 + 462; FedSCMR and FedUCH follow them.
    """
    parts = [("train", train), ("val", test // 3), ("test", test - test // 3)]
    return np.concatenate([np.full(size, SPLITS.index(name), np.uint8) for name, size in parts])


def wikipedia_lists(folder: Path) -> dict[str, list[tuple[str, str, int]]]:
    """Text, image and class (from 0) of each pair, for ``train`` and ``test``.

    Raises:
        InputError: a list is missing or has a malformed line.
    """
    pairs: dict[str, list[tuple[str, str, int]]] = {}
    for split, name in WIKIPEDIA_LISTS.items():
        pairs[split] = []
        for number, line in enumerate(read_text(folder / name).splitlines(), 1):
            parts = line.split()
            if not parts:
                continue
            if len(parts) != 3 or not is_number(parts[2]) or not 1 <= int(parts[2]) <= len(WIKIPEDIA_CLASSES):
                raise InputError(f"{folder / name}: line {number}", line, "text, image and a class from 1 to 10")
            pairs[split].append((parts[0], parts[1], int(parts[2]) - 1))
    return pairs


def wikipedia_photos(data: Data) -> RawSet:
    """Read Wikipedia (Rasiwasia et al. 2010): ``images/<class>/*.jpg``, ``texts/*.xml`` and the two list files.

    An item whose text file is missing has no caption.

    Raises:
        InputError: a list is missing or malformed, the folder of texts is missing, or a text is unreadable.
    """
    folder = folder_of(data)
    notes = data.annotations or folder
    lists = wikipedia_lists(notes)
    texts = first_existing([notes / "texts", folder / "texts"], "data.path", "folder of texts")
    pairs = [*lists["train"], *lists["test"]]
    root = data.images or folder / "images"
    paths, captions = [], []
    for text, image, number in pairs:
        inside = root / WIKIPEDIA_CLASSES[number] / f"{image}.jpg"
        flat = root / f"{image}.jpg"
        paths.append(flat if not exists(inside) and exists(flat) else inside)
        written = texts / f"{text}.xml"
        content = read_text(written) if exists(written) else ""
        caption = element(content, "text") or plain(content)
        captions.append((caption,) if caption else ())
    return checked(
        RawSet(
            place=str(folder),
            # Texts and images both occur in several pairs.
            keys=tuple(f"{text}/{image}" for text, image, _ in pairs),
            images=ImageFiles(tuple(paths)),
            captions=tuple(captions),
            label_names=WIKIPEDIA_CLASSES,
            split=wikipedia_split(len(lists["train"]), len(lists["test"])),
        ),
        [(WIKIPEDIA_CLASSES[number],) for _, _, number in pairs],
    )


# --- Pascal Sentence ------------------------------------------------------------------------------------------------


def read_pascal(data: Data) -> RawSet:
    """Read Pascal Sentence (Rashtchian et al. 2010): an image folder and a text folder, each with one folder per class.

    A text file has the stem of its image and one sentence per line. The set has no official split.

    Raises:
        InputError: a folder is missing.
    """
    folder = folder_of(data)
    choices = [folder / name for name in ("dataset", "images", "image")]
    root = data.images or first_existing(choices, "data.images", "folder of images")
    choices = [folder / name for name in ("sentence", "sentences", "texts")]
    texts = data.annotations or first_existing(choices, "data.annotations", "folder of sentences")
    # Thumbnail lists and checksum files share the stems of images.
    images = [path for path in files_below(root) if path.suffix.lower() in IMAGE_ENDINGS]
    endings = {path.relative_to(root).with_suffix(""): path for path in images}
    written = {path.relative_to(texts).with_suffix(""): path for path in files_below(texts) if path.suffix == ".txt"}
    inner = sorted(set(endings) | set(written))
    captions = []
    for stem in inner:
        lines = read_text(written[stem]).splitlines() if stem in written else []
        captions.append(tuple(line.strip() for line in lines if line.strip()))
    paths = tuple(endings.get(stem, root / f"{stem}.jpg") for stem in inner)
    keys = tuple(stem.as_posix() for stem in inner)
    return checked(
        RawSet(str(folder), keys, ImageFiles(paths), tuple(captions)), [stem.parts[:-1][:1] for stem in inner]
    )


# --- MIRFlickr-25K and NUS-WIDE -------------------------------------------------------------------------------------

#: Number of NUS-WIDE's 81 labels to keep, the most frequent ones, as in DCMH.
NUS_LABELS = 21


def _named(words: Sequence[str]) -> tuple[str, ...]:
    """A vocabulary as :class:`RawSet` has it; none if a word is listed twice."""
    return tuple(words) if len(set(words)) == len(words) else ()


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
            bag=multi_hot(tags, vocabulary),
            vocabulary=_named(vocabulary),
            labels=labels,
            label_names=tuple(path.stem for path in files),
        )
    )


def _digits(path: Path, width: int | None) -> U8:
    """Read a file of lines of 0/1 digits, with or without separators: uint8 [lines, width]."""
    rows = []
    quarantine.note(str(path), "lines of 0 and 1")
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
