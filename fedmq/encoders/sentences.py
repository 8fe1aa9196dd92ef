"""Any sentence encoder of a local folder, as BERT's are distributed: config.json, tokenizer, model.safetensors.

FedSCMR and FedCMR encode texts with a sentence-BERT of 1,024 dimensions, FedUCH's COCO and IAPR TC-12 with BERT. The
folder is what ``sentence-transformers`` or ``transformers`` save; without a pooling of its own tokens are averaged.
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
# What decides a vector: weights, their configuration, the tokeniser's vocabulary and the pooling.
_ENDINGS = frozenset({".safetensors", ".json", ".txt", ".model"})


def weights_digest(folder: Path) -> str:
    """SHA-256 (hex) over the folder's weights, configuration and vocabulary: a key for caches.

    Raises:
        InputError: no such folder, or no weights in it that can be read safely.
    """
    files = sorted(path for path in folder.rglob("*") if path.suffix in _ENDINGS and path.is_file())
    if not any(path.suffix == ".safetensors" for path in files):
        found = "no such folder" if not folder.is_dir() else "no model.safetensors in it"
        raise InputError(f"{_PLACE}: {folder}", found, "a folder with config.json, a tokenizer and model.safetensors")
    return key_of("sentences", [[str(path.relative_to(folder)), file_digest(path)] for path in files])


def load(folder: Path, device: str) -> Encode:
    """The encoder: texts to float32 [n, d], as the folder's own pooling and scaling have them.

    Args:
        folder: as :func:`weights_digest` takes it.
        device: where it computes.

    Raises:
        InputError: sentence-transformers is not installed, or the folder holds no such encoder.
    """
    library = package("sentence_transformers", "bert", str(folder))
    try:
        # Nothing is fetched, no code of the folder is run, and no pickled weights are read.
        model = library.SentenceTransformer(
            str(folder),
            device=device,
            local_files_only=True,
            trust_remote_code=False,
            model_kwargs={"use_safetensors": True},
        )
    except Exception as error:  # the library raises whatever its parts do on a folder that is no encoder
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"{_PLACE}: {folder}", reason, "a sentence encoder that sentence-transformers loads") from None

    def encode(texts: Sequence[str]) -> npt.NDArray[np.float32]:
        found = model.encode(list(texts), batch_size=BATCH, show_progress_bar=False, convert_to_numpy=True)
        return np.asarray(found, dtype=np.float32)

    return encode
