"""What a search needs without torch, whose import takes longer than the search: encoded galleries, encoded queries.

A gallery is a folder that :mod:`fedmq.retrieval.gallery` creates atomically:

    image.npy, text.npy   embeddings float32 [n, d] and [m, d], or codes uint8 [n, bytes], eight bits to a byte
    owner.npy             the item of each caption, int64 [m]
    items.jsonl           a line for each item: its key, and the captions as text if the data set has any
    gallery.json          its model and its source

Queries are encoded with onnxruntime. The first search with a model whose backbone is ``lite`` writes two ONNX files to
the cache: the frozen encoder, which all models share, and the model's tower. They compute the same as the model, up to
rounding. Their digests are kept beside them, so that a search notices a file that was not written to its end.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fedmq.config.sections import Modality
from fedmq.data.prepared_arrays import Prepared, PreparedMeta, mapped
from fedmq.encoders.base import Array, stated_digest
from fedmq.encoders.image_sets import files_below
from fedmq.encoders.images import IMAGE_ENDINGS, PIXELS_VERSION, Pixels
from fedmq.errors import InputError
from fedmq.evaluation import hamming
from fedmq.packages import package
from fedmq.runs.release import ReleaseConfig, is_model, model_config, released_config
from fedmq.storage.cache import cache_folder, file_digest, key_of
from fedmq.storage.json_files import Stored, checked_json, read_json
from fedmq.storage.regular_files import read_regular
from fedmq.storage.run_folder import RunFolder, open_run

Among = Literal["images", "captions"]

FORMAT: Final = 1
AGAIN = "an exported gallery; delete the folder to create it again"
#: Folder in the cache for galleries of models whose own folder is not writable.
ELSEWHERE: Final = "galleries"
#: Maximum size of ``items.jsonl`` [bytes].
_MOST_BYTES: Final = 1 << 32


class GalleryMeta(Stored):
    """``gallery.json``: model and source of a gallery."""

    format: Literal[1]  # format of the folder
    model_digest: str  # SHA-256 (hex) of the model
    silo: str | None = None  # the silo whose personal model it is; None for the shared model
    made_of: str = ""  # description of the source
    binary: bool  # whether it holds codes, ranked by Hamming distance
    bits: int | None = None  # length of a code; None for embeddings
    dim: int | None = None  # width of an embedding; None for codes
    items: int  # number of items
    captions: int  # number of captions
    # Metadata of the run's data set, with the shapes and labels needed to build its model; None if the model was used
    # without its run.
    prepared: PreparedMeta | None = None


class Item(Stored):
    """A line of ``items.jsonl``."""

    key: str  # name of the item
    captions: list[str]  # its captions, as text; empty if the data set has vectors only

    def caption(self, number: int = 0) -> str:
        """One caption; empty if it is unknown."""
        return self.captions[number] if number < len(self.captions) else ""


def write_items(path: Path, items: Iterable[tuple[str, list[str]]]) -> None:
    """Write keys and captions as ``items.jsonl``."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps({'key': key, 'captions': captions})}\n" for key, captions in items)


class Items:
    """``items.jsonl`` of a gallery; only the lines that are asked for are decoded.

    Raises:
        InputError: the file is missing, or has another number of lines.
    """

    def __init__(self, path: Path, count: int) -> None:
        self._path = path
        self._text = read_regular(path, AGAIN, _MOST_BYTES)
        self._ends = np.flatnonzero(np.frombuffer(self._text, np.uint8) == ord("\n"))
        if len(self._ends) != count or not self._text.endswith(b"\n"):
            raise InputError(str(path), f"{len(self._ends)} items in a gallery of {count}", AGAIN)

    def __getitem__(self, row: int) -> Item:
        start = 0 if row == 0 else int(self._ends[row - 1]) + 1
        line = self._text[start : int(self._ends[row])]
        return checked_json(f"{self._path}: line {row + 1}", line, Item, AGAIN)

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def keys(self) -> list[str]:
        """The names of all items."""
        return [self[row].key for row in range(len(self))]

    def row(self, key: str) -> int | None:
        """Row of the first item of this name; None without one."""
        # Quotation marks within a JSON string are escaped, so this is the start of a line.
        place = self._text.find(f"{json.dumps({'key': key})[:-1]},".encode())
        return None if place < 0 else int(np.searchsorted(self._ends, place))


@dataclass(frozen=True)
class Gallery:
    """An exported gallery."""

    folder: Path  # folder of its files
    meta: GalleryMeta  # ``gallery.json``

    @property
    def binary(self) -> bool:
        """Whether it holds codes, ranked by Hamming distance."""
        return self.meta.binary

    @property
    def prepared(self) -> Prepared:
        """Shapes and labels of the run's data set, without its data; building the model needs only these.

        Raises:
            InputError: the gallery was made by a model without its run.
        """
        if self.meta.prepared is None:
            raise InputError(str(self.folder / "gallery.json"), "no description of the run's data", AGAIN)
        return Prepared(self.folder, self.meta.prepared)

    @cached_property
    def items(self) -> Items:
        """Names and captions."""
        return Items(self.folder / "items.jsonl", self.meta.items)

    def array(self, name: str) -> Array:
        """One array, mapped from its file: ``image`` [n, .], ``text`` [m, .], or ``owner`` int64 [m].

        Raises:
            InputError: the file is damaged, or holds something else than ``gallery.json`` says.
        """
        path, rows = self.folder / f"{name}.npy", self.meta.items if name == "image" else self.meta.captions
        width = self.meta.dim if self.meta.bits is None else -(-self.meta.bits // 8)
        expected = ("i", rows) if name == "owner" else ("u" if self.binary else "f", rows, width)
        array = mapped(path, AGAIN)
        found = (array.dtype.kind, *array.shape)
        if found != expected or (name == "owner" and not self._are_owners(array)):
            shown = f"{found[0]} {list(found[1:])}, or other values"
            raise InputError(str(path), shown, f"{expected[0]} {list(expected[1:])} of {AGAIN}")
        return array

    def _are_owners(self, array: Array) -> bool:
        """Whether numbers of items ascend."""
        return not len(array) or bool((np.diff(array) >= 0).all() and 0 <= array[0] <= array[-1] < self.meta.items)


def open_gallery(folder: Path, used: str) -> Gallery:
    """Open an exported gallery, which must have been encoded with the model of this digest."""
    path = folder / "gallery.json"
    meta = read_json(path, GalleryMeta, AGAIN)
    if meta.model_digest != used:
        raise InputError(str(path), f"a gallery of model {meta.model_digest[:12]}", f"of {used[:12]}: {AGAIN}")
    return Gallery(folder, meta)


def folder_name(what: str, silo: str | None, digest: str) -> str:
    """Name of a gallery's folder: the source, the silo if its personal model is used, and a digest."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", what) or "gallery"
    return f"{plain}-{'' if silo is None else f'{silo}-'}{digest[:12]}"


def images_below(folder: Path, place: str) -> list[Path]:
    """The image files below a folder, in the order of their paths; links to folders are followed.

    Raises:
        InputError: there are none; ``place`` is the option or argument that names the folder.
    """
    files = sorted(path for path in files_below(folder) if path.suffix.lower() in IMAGE_ENDINGS)
    if not files:
        raise InputError(f"{place} {folder}", "no image", f"a folder with {', '.join(sorted(IMAGE_ENDINGS))}")
    return files


def folder_contents(folder: Path, used: str) -> tuple[list[Path], list[str], str]:
    """The images below a folder, their names, and the digest of a gallery of them for the model of digest ``used``.

    Raises:
        InputError: there are none, or one cannot be read.
    """
    files = images_below(folder, "--gallery")
    # Bytes of file names that are not UTF-8 are escaped, because they could not be printed.
    keys = [os.fsencode(path.relative_to(folder)).decode("utf-8", "backslashreplace") for path in files]
    contents = [[key, file_digest(path)] for key, path in zip(keys, files, strict=True)]
    return files, keys, key_of("folder", used, contents, PIXELS_VERSION)


def existing_gallery(root: Path, images: Path | None = None) -> tuple[Gallery, ReleaseConfig] | None:
    """A gallery that the shared model of a release has encoded, with its configuration; None if there is none yet.

    The release is a run folder, or a model's without its run; without a folder of images, it is the run's own data set.

    Raises:
        InputError: the release or the gallery is damaged, or the folder has no image.
        OtherModelError: the release does not match the digests in the run's summary.
    """
    model = root if is_model(root) else RunFolder(root).model
    places = [place for place in (model / "gallery", cache_folder() / ELSEWHERE) if place.is_dir()]
    if not places or (images is not None and not images.is_dir()):
        return None
    config = model_config(root) if model == root else released_config(open_run(root))
    used, what = config.model_digest, ("data", config.model_digest)
    if images is not None:
        what = (images.resolve().name, folder_contents(images, used)[2])
    folders = [folder for place in places if (folder := place / folder_name(what[0], None, what[1])).is_dir()]
    return None if config.personal_only or not folders else (open_gallery(folders[0], used), config)


#: Files in a folder of the cache: the ONNX file, and the SHA-256 (hex) of its bytes.
ONNX_FILE, _ONNX_DIGEST = "model.onnx", "model.sha256"
_OF_CACHE = "a file of the cache; delete the folder to write it again"


class QueryFolders(NamedTuple):
    """Folders of the two ONNX files for queries of a modality."""

    encoder: Path  # of the frozen encoder, whose inputs are those of :func:`lite_inputs.one_input`
    tower: Path  # of the model's tower, as ``fedmq export --onnx`` writes it

    @property
    def exist(self) -> bool:
        """Whether both were written."""
        return self.encoder.is_dir() and self.tower.is_dir()


def query_folders(config: ReleaseConfig, modality: Modality) -> QueryFolders | None:
    """The folders of a released model; None if its encoder is not this machine's ``lite``, or a package is missing."""
    if config.backbone.get("name") != "lite" or find_spec("onnxruntime") is None:
        return None
    from fedmq.encoders import lite_inputs  # noqa: PLC0415 - not needed by other backbones

    digest = lite_inputs.encoder_digest(modality)
    if config.frozen.get(modality) not in (digest, stated_digest(digest)):
        return None
    root = cache_folder() / "query_towers"
    return QueryFolders(root / key_of("encoder", digest), root / key_of("tower", modality, config.plain()))


def query_vector(folders: QueryFolders, item: str | Pixels, *, binary: bool) -> Array:
    """The vector of a text or an image for an index: float32 [1, d] of unit length, or a packed code uint8 [1, bytes].

    Raises:
        InputError: a file is missing or damaged.
    """
    from fedmq.encoders import lite_inputs  # noqa: PLC0415 - imports the tokeniser's package

    embedded = _computed(folders.encoder, lite_inputs.one_input(item))
    output = _computed(folders.tower, {"x": embedded})
    return hamming.pack(output) if binary else output


def seal(folder: Path) -> None:
    """Write the digest of a folder's ONNX file beside it."""
    with (folder / ONNX_FILE).open("rb") as file:
        # `file_digest` remembers a file's digest, which must not outlive its content if the machine fails.
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    (folder / _ONNX_DIGEST).write_text(digest, encoding="ascii")


def _computed(folder: Path, inputs: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
    path = folder / ONNX_FILE
    # The digest is remembered: an unchanged file is read once.
    if read_regular(folder / _ONNX_DIGEST, _OF_CACHE, 64) != file_digest(path).encode():
        raise InputError(str(path), f"other content than {_ONNX_DIGEST} says", _OF_CACHE)
    try:
        (output,) = session(path).run(None, inputs)
    except Exception as error:  # onnxruntime raises many types
        raise InputError(str(path), str(error).partition("\n")[0][:200], _OF_CACHE) from None
    return np.asarray(output, np.float32)


def session(path: Path) -> Any:
    """Open an ONNX file in onnxruntime, on one thread of the CPU."""
    runtime = package("onnxruntime", "onnx", "a search")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
