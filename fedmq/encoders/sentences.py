"""Sentence encoders from a local folder, as saved by ``sentence-transformers`` or ``transformers``.

The encoder runs in the quarantine, because a configuration may ask for any number of layers of any size.

The folder holds config.json, a tokenizer and model.safetensors; without a pooling configuration, token embeddings are
averaged. FedSCMR and FedCMR encode texts with a Sentence-BERT of 1,024 dimensions; FedUCH encodes COCO and IAPR TC-12
with BERT.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from fedmq.errors import InputError
from fedmq.packages import package
from fedmq.storage import quarantine
from fedmq.storage.cache import file_digest, key_of

T = TypeVar("T")
Encode = Callable[[Sequence[str]], npt.NDArray[np.float32]]

_PLACE = "backbone.text_encoder"
# Files that determine embeddings: weights, configuration, vocabulary and pooling.
_ENDINGS = frozenset({".safetensors", ".json", ".txt", ".model"})
#: Modules that an encoder may have, by the names of their classes in ``modules.json``, which would be imported.
_MODULES: Final = ("Transformer", "Pooling", "Dense", "LayerNorm", "Normalize")
_ALLOWED: Final = "a sentence encoder that sentence-transformers loads"
_ROWS: Final = 32  # texts per forward pass


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

    Raises:
        InputError: sentence-transformers is not installed, it cannot load the folder, or weights are missing. Both
            functions raise it if the encoder fails, or computes values that are not finite.
    """
    place, about = f"{_PLACE}: {folder}", (folder, weights_digest(folder))
    files = sorted(path for path in folder.rglob("*") if path.suffix in _ENDINGS)

    def read(function: Callable[..., T], *arguments: object, within: bool = True) -> T:
        return quarantine.read(
            function,
            *about,
            *arguments,
            place=place,
            allowed=_ALLOWED,
            files=files,
            libraries=("sentence_transformers", "transformers"),
            limit_memory=within,
        )

    read(check)

    def encode(texts: Sequence[str]) -> npt.NDArray[np.float32]:
        vectors = np.asarray(read(vectors_of, device, list(texts), within=device == "cpu"), dtype=np.float32)
        if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
            what = f"vectors of shape {list(vectors.shape)} for {len(texts)} texts, or values that are not finite"
            raise InputError(place, what, "an encoder with one finite vector for each text")
        return vectors

    def cut(texts: Sequence[str]) -> list[bool]:
        return read(are_cut, list(texts))

    return encode, cut


# --- in the quarantine ----------------------------------------------------------------------------------------------


def check(folder: str, digest: str) -> None:
    """Load the encoder, which is kept for the calls that follow."""
    _model(folder, digest)


def vectors_of(folder: str, digest: str, device: str, texts: list[str]) -> Any:
    """The vectors of texts: float32 [n, d]."""
    model = _model(folder, digest).to(device)
    return model.encode(texts, batch_size=_ROWS, show_progress_bar=False, convert_to_numpy=True)


def are_cut(folder: str, digest: str, texts: list[str]) -> list[bool]:
    """Whether each text has more tokens than the encoder reads."""
    model = _model(folder, digest)
    limit = model.max_seq_length
    encoded = model.tokenizer(texts, truncation=False, verbose=False)["input_ids"]
    return [limit is not None and len(ids) > limit for ids in encoded]


@functools.lru_cache(maxsize=1)
def _model(folder: str, _digest: str) -> Any:
    """The encoder on the CPU; downloads nothing, runs no code from the folder, and unpickles nothing."""
    library, transformers = package("sentence_transformers", "bert", folder), package("transformers", "bert", folder)
    transformers.utils.logging.set_verbosity_error()
    _check_modules(Path(folder))
    offline: dict[str, object] = {"local_files_only": True, "trust_remote_code": False}
    model = library.SentenceTransformer(folder, device="cpu", model_kwargs={"use_safetensors": True}, **offline)
    # The library draws missing weights at random. Its loading report is not kept, so the network is loaded once more.
    network = model[0].auto_model
    _, report = type(network).from_pretrained(
        network.config.name_or_path, output_loading_info=True, use_safetensors=True, local_files_only=True
    )
    # BERT's pooler, which files often lack, takes part in no vector.
    if missing := [name for name in sorted(report["missing_keys"]) if "pooler." not in name]:
        allowed = "weights of all layers of config.json, in safetensors files"
        raise InputError(f"{_PLACE}: {folder}", f"no values for {missing[0]}", allowed)
    return model


def _check_modules(folder: Path) -> None:
    """Refuse modules of other classes, or without their own weights in safetensors files."""
    listed = folder / "modules.json"
    for module in json.loads(listed.read_text("utf-8")) if listed.exists() else ():
        package_name, _, name = str(module["type"]).rpartition(".")
        if package_name.partition(".")[0] != "sentence_transformers" or name not in _MODULES:
            allowed = f"modules of sentence_transformers: {', '.join(_MODULES)}"
            raise InputError(f"{_PLACE}: {listed}", str(module["type"])[:80], allowed)
        path = folder / str(module["path"])
        if not path.resolve().is_relative_to(folder.resolve()):
            raise InputError(f"{_PLACE}: {listed}", str(module["path"])[:80], "a folder in that of the encoder")
        if name in ("Dense", "LayerNorm") and not (path / "model.safetensors").is_file():
            raise InputError(f"{_PLACE}: {path}", "no model.safetensors", "the weights of this layer")
