"""Sentence encoders from a local folder, as saved by ``sentence-transformers`` or ``transformers``.

The folder holds config.json, a tokenizer and model.safetensors; without a pooling configuration, token embeddings are
averaged. FedSCMR and FedCMR encode texts with a Sentence-BERT of 1,024 dimensions; FedUCH encodes COCO and IAPR TC-12
with BERT.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmq.encoders.base import BATCH
from fedmq.encoders.sentence_folder import check_folder, check_loaded
from fedmq.errors import InputError
from fedmq.packages import package
from fedmq.storage.cache import file_digest, key_of

Encode = Callable[[Sequence[str]], npt.NDArray[np.float32]]

_PLACE = "backbone.text_encoder"
# Files that determine embeddings: weights, configuration, vocabulary and pooling.
_ENDINGS = frozenset({".safetensors", ".json", ".txt", ".model"})


def weights_digest(folder: Path) -> str:
    """SHA-256 (hex) of the folder's weights, configuration and vocabulary, used as a cache key.

    Raises:
        InputError: the folder does not exist or has no safetensors weights.
    """
    files = sorted(path for path in folder.rglob("*") if path.suffix in _ENDINGS and path.is_file())
    if not any(path.suffix == ".safetensors" for path in files):
        found = "no such folder" if not folder.is_dir() else "no model.safetensors in it"
        raise InputError(f"{_PLACE}: {folder}", found, "a folder with config.json, a tokenizer and model.safetensors")
    return key_of("sentences", [[str(path.relative_to(folder)), file_digest(path)] for path in files])


def load(folder: Path, device: str) -> tuple[Encode, Callable[[Sequence[str]], list[bool]]]:
    """Load an encoder from texts to float32 [n, d], with the folder's pooling and normalisation.

    The second function says of each text whether it has more tokens than the encoder reads.

    Args:
        folder: folder of the encoder.
        device: device to compute on.

    Raises:
        InputError: sentence-transformers is not installed, it cannot load the folder, or weights are missing. Both
            functions raise it if the encoder fails, or computes values that are not finite.
    """
    library, transformers = package("sentence_transformers", "bert", str(folder)), package("transformers", "bert", "")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # its reports take many lines
    check_folder(folder, _PLACE)
    # Downloads nothing, runs no code from the folder, and unpickles nothing.
    model = _guarded(
        folder,
        lambda: library.SentenceTransformer(
            str(folder),
            device=device,
            local_files_only=True,
            trust_remote_code=False,
            model_kwargs={"use_safetensors": True},
        ),
    )
    check_loaded(folder, model, _PLACE)

    def encode(texts: Sequence[str]) -> npt.NDArray[np.float32]:
        vectors = _guarded(
            folder,
            lambda: model.encode(list(texts), batch_size=BATCH, show_progress_bar=False, convert_to_numpy=True),
        )
        found = np.asarray(vectors, dtype=np.float32)
        if found.ndim != 2 or len(found) != len(texts) or not np.isfinite(found).all():
            what = f"vectors of shape {list(found.shape)} for {len(texts)} texts, or values that are not finite"
            raise InputError(f"{_PLACE}: {folder}", what, "an encoder with one finite vector for each text")
        return found

    def cut(texts: Sequence[str]) -> list[bool]:
        limit = model.max_seq_length
        encoded = _guarded(folder, lambda: model.tokenizer(list(texts), truncation=False, verbose=False)["input_ids"])
        return [limit is not None and len(ids) > limit for ids in encoded]

    return encode, cut


def _guarded(folder: Path, action: Callable[[], Any]) -> Any:
    """Run an action of the library, which raises various exceptions on an invalid folder."""
    try:
        return action()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"{_PLACE}: {folder}", reason, "a sentence encoder that sentence-transformers loads") from None
