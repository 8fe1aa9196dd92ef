"""Encode a query with onnxruntime, because importing torch takes longer than a search.

The first search with a model whose backbone is ``lite`` writes two ONNX files to the cache: the frozen encoder, which
all models share, and the model's tower. They compute the same as the model, up to rounding. Their digests are kept
beside them, so that a search notices a file that was not written to its end.
"""

from __future__ import annotations

import hashlib
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedmq.config.sections import Modality
from fedmq.encoders.base import Array, stated_digest
from fedmq.encoders.images import Pixels
from fedmq.errors import InputError
from fedmq.evaluation import hamming
from fedmq.packages import package
from fedmq.runs.release import ReleaseConfig
from fedmq.storage.cache import cache_folder, file_digest, key_of
from fedmq.storage.regular_files import read_regular

#: Files in a folder of the cache: the ONNX file, and the SHA-256 (hex) of its bytes.
FILE, _DIGEST = "model.onnx", "model.sha256"
_AGAIN = "a file of the cache; delete the folder to write it again"


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
    with (folder / FILE).open("rb") as file:
        # `file_digest` remembers a file's digest, which must not outlive its content if the machine fails.
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    (folder / _DIGEST).write_text(digest, encoding="ascii")


def _computed(folder: Path, inputs: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
    path = folder / FILE
    # The digest is remembered: an unchanged file is read once.
    if read_regular(folder / _DIGEST, _AGAIN, 64) != file_digest(path).encode():
        raise InputError(str(path), f"other content than {_DIGEST} says", _AGAIN)
    try:
        (output,) = session(path).run(None, inputs)
    except Exception as error:  # onnxruntime raises many types
        raise InputError(str(path), str(error).partition("\n")[0][:200], _AGAIN) from None
    return np.asarray(output, np.float32)


def session(path: Path) -> Any:
    """Open an ONNX file in onnxruntime, on one thread of the CPU."""
    runtime = package("onnxruntime", "onnx", "a search")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
