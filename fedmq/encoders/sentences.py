"""Sentence encoders from a local folder, as saved by ``sentence-transformers`` or ``transformers``.

The folder holds config.json, a tokenizer and model.safetensors; without a pooling configuration, token embeddings are
averaged. FedSCMR and FedCMR encode texts with a Sentence-BERT of 1,024 dimensions; FedUCH encodes COCO and IAPR TC-12
with BERT.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedmq.encoders.base import BATCH
from fedmq.errors import InputError
from fedmq.extras import package
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
        InputError: sentence-transformers is not installed, or it cannot load the folder.
    """
    library = package("sentence_transformers", "bert", str(folder))
    try:
        # Downloads nothing, runs no code from the folder, and unpickles nothing.
        model = library.SentenceTransformer(
            str(folder),
            device=device,
            local_files_only=True,
            trust_remote_code=False,
            model_kwargs={"use_safetensors": True},
        )
    except Exception as error:  # the library raises various exceptions on an invalid folder
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"{_PLACE}: {folder}", reason, "a sentence encoder that sentence-transformers loads") from None

    def encode(texts: Sequence[str]) -> npt.NDArray[np.float32]:
        vectors = model.encode(list(texts), batch_size=BATCH, show_progress_bar=False, convert_to_numpy=True)
        return np.asarray(vectors, dtype=np.float32)

    def cut(texts: Sequence[str]) -> list[bool]:
        limit = model.max_seq_length
        lengths = [len(ids) for ids in model.tokenizer(list(texts), truncation=False, verbose=False)["input_ids"]]
        return [limit is not None and length > limit for length in lengths]

    return encode, cut
