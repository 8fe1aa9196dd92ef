"""A released model: its configuration, its files and their digests, and the signature of its folder. Without torch.

``signature.json`` has the SHA-256 of every file of the folder and an Ed25519 signature over them: who released these
files, and were they changed since? Encoded galleries (``gallery/``) are not part of a release and are ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import Field, JsonValue

from fedmq.errors import InputError
from fedmq.runs.run_records import RunSummary
from fedmq.storage.json_files import Digest, Finite, Stored, read_json
from fedmq.storage.regular_files import check_regular, open_regular
from fedmq.storage.run_folder import write_json
from fedmq.wire.fields import FieldError
from fedmq.wire.keys import Identity, public_key_of
from fedmq.wire.layout import MAX_BYTES, Layout
from fedmq.wire.payloads import ClassPrototypes, Memory, Payload


class ReleasedInputs(Stored):
    """Shapes and dtypes of the model's inputs of one item, as :class:`fedmq.encoders.base.InputSpec` describes them."""

    image_shape: list[int]
    text_shape: list[int]
    image_dtype: str
    text_dtype: str
    mean: list[Finite] = Field(default_factory=list)
    std: list[Finite] = Field(default_factory=list)


class ReleaseConfig(Stored):
    """``model/config.json``: the configuration of a released model.

    It is enough to build the model without the training data.

    Args:
        backbone: the scenario's backbone section.
        objective: the scenario's objective section.
        protocol: the method.
        dim: dimension of the embeddings.
        layout_digest: SHA-256 (hex) of the parameters' layout.
        layout: names of its entries, in the order that ``model.safetensors`` does not keep.
        model_digest: digest of the parameters.
        data_digest: digest of the prepared data's content.
        released_with: digests of the payloads released with the model, by kind.
        seed: seed of the run, from which random frozen weights are drawn.
        inputs: shapes and dtypes of the model's inputs.
        label_names: names of the data's labels, in the order of a classifier's outputs.
        texts: ``sentences`` if captions are encoded from text, ``bag`` for bags of words, ``vectors`` for features.
        frozen: digest of the frozen encoder of each modality (``image``, ``text``), with its preprocessing; ``blocks``
            is that of encoders that contain the adapters. Empty for features. With ``partition.kind own`` it is the
            digest that the sites stated, :func:`fedmq.encoders.base.stated_digest`.
        personal_only: the shared model is not fully trained, so that retrieval needs a silo's personal model.
    """

    backbone: dict[str, JsonValue]
    objective: dict[str, JsonValue]
    protocol: str
    dim: int
    layout_digest: Digest
    layout: list[str]
    model_digest: Digest
    data_digest: Digest | None = None
    released_with: dict[str, Digest]
    seed: int
    inputs: ReleasedInputs
    label_names: list[str] = Field(default_factory=list)
    texts: Literal["sentences", "bag", "vectors"]
    frozen: dict[str, str] = Field(default_factory=dict)
    personal_only: bool = False


#: Payloads that may be released with a model, by kind: name in messages, and constructor from the file's arrays.
BESIDE: Mapping[str, tuple[str, Callable[..., Payload]]] = {
    Memory.KIND: ("a memory", Memory),
    ClassPrototypes.KIND: ("a query bank", partial(ClassPrototypes, modality="both")),
}
_ALLOWED = "a file of the run's release"


def parameters(path: Path, names: Sequence[str]) -> tuple[Layout, npt.NDArray[Any]]:
    """The layout and the parameters [P] of a released model, as sent over the wire.

    Args:
        path: ``model.safetensors``.
        names: names of the layout's entries, in the order that the file does not keep.

    Raises:
        InputError: the file is damaged, or has other tensors.
    """
    tensors = _arrays(path)
    strange = sorted(tensors.keys() ^ set(names))
    if strange:
        raise InputError(str(path), f"a difference in {strange[0]}", "the tensors that config.json lists")
    try:
        layout = Layout.of((name, tensors[name].shape, tensors[name].dtype.name) for name in names)
    except FieldError as error:
        raise InputError(str(path), str(error), _ALLOWED) from None
    raw = b"".join(np.ascontiguousarray(tensors[name]).tobytes() for name in names)
    alike = all(entry.dtype == "float32" for entry in layout.entries)
    return layout, np.frombuffer(raw, np.float32 if alike else np.uint8)


def beside(path: Path, kind: str) -> Payload:
    """Read a payload that was released with a model.

    Args:
        path: the file.
        kind: kind of the payload, a key of :data:`BESIDE`.

    Raises:
        InputError: the file is damaged or has other content.
    """
    what, make = BESIDE[kind]
    try:
        return make(**_arrays(path))
    except (TypeError, FieldError) as error:
        raise InputError(str(path), str(error), what) from None


def _arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    from safetensors.numpy import load_file  # noqa: PLC0415 - most readers need no release

    check_regular(path, MAX_BYTES + (1 << 24), _ALLOWED)  # a safetensors file has a header in addition to the tensors
    try:
        return dict(load_file(path))
    except Exception as error:  # safetensors and the file system raise many types
        raise InputError(str(path), str(error), _ALLOWED) from None


def digests_of(record: RunSummary | ReleaseConfig) -> dict[str, str]:
    """Digests (hex) of the release and its data that a configuration or a summary records, by name in messages."""
    return digests_by_name(record.model_digest, record.data_digest, record.released_with)


def digests_by_name(model: str, data: str | None, with_it: Mapping[str, str]) -> dict[str, str]:
    """Digests (hex) of a release by name in messages; ``nothing`` if the data have none.

    Args:
        model: digest of the parameters.
        data: digest of the prepared data's content.
        with_it: digests of the payloads released with the model, by kind.
    """
    return {"a model": model, "data": data or "nothing", **with_it}


SIGNATURE: Final = "signature.json"
_GALLERY = "gallery"
_DOMAIN = b"fedmq model folder 1\n"  # so that no other signature of the key can be mistaken for this one
_ALLOWED = "the signature of a model's folder, made by fedmq sign"
_MAX_FILES = 1000
_BLOCK = 1 << 20


class Signature(Stored):
    """``signature.json``.

    Args:
        format: format of the file.
        signer: name of the key.
        key: public Ed25519 key (hex).
        files: SHA-256 (hex) of each file, by its path in the folder.
        signature: Ed25519 signature (hex).
    """

    format: Literal[1]
    signer: Annotated[str, Field(min_length=1, max_length=64)]
    key: Digest
    files: Annotated[dict[str, Digest], Field(max_length=_MAX_FILES)]
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


@dataclass(frozen=True)
class Verified:
    """What a verification found.

    Args:
        signer: name of the key, as the signature states it.
        key: the public key that signed.
        files: number of signed files.
        differences: a line for each file that differs; empty if the folder is as it was signed.
    """

    signer: str
    key: Ed25519PublicKey
    files: int
    differences: tuple[str, ...]


def sign_model(folder: Path, identity: Identity) -> Signature:
    """Sign a model's folder and write ``signature.json`` into it; an older signature is replaced.

    Args:
        folder: with ``config.json`` and ``model.safetensors``.
        identity: name and private key of the signer.

    Raises:
        InputError: it is not a model's folder, or holds something other than regular files.
    """
    files = _digests(folder)
    for name in ("config.json", "model.safetensors"):
        if name not in files:
            raise InputError(str(folder), f"no {name} in it", "the folder of a released model")
    made = Signature(
        format=1,
        signer=identity.name,
        key=identity.key.public_key().public_bytes_raw().hex(),
        files=files,
        signature=identity.key.sign(_signed(identity.name, files)).hex(),
    )
    write_json(folder / SIGNATURE, made.plain())
    return made


def verify_model(folder: Path) -> Verified:
    """Compare a model's folder with its signature.

    The result says which key signed; whether that key is trusted is for the caller to decide.

    Raises:
        InputError: there is no signature, it is malformed or of other content, or the folder holds something other than
            regular files.
    """
    path = folder / SIGNATURE
    if not path.is_file():
        raise InputError(str(folder), f"no {SIGNATURE} in it", "the folder of a model signed by fedmq sign")
    made = read_json(path, Signature, _ALLOWED)
    for name in made.files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise InputError(f"{path}: files", name, "paths within the folder")
    try:
        key = public_key_of(bytes.fromhex(made.key))
        key.verify(bytes.fromhex(made.signature), _signed(made.signer, made.files))
    except (InvalidSignature, ValueError):
        raise InputError(str(path), "a signature that does not fit its list of files", _ALLOWED) from None
    digests = _digests(folder)
    differences = []
    for name in sorted(made.files.keys() | digests.keys()):
        if name not in digests:
            differences.append(f"{name}: missing")
        elif name not in made.files:
            differences.append(f"{name}: not signed")
        elif digests[name] != made.files[name]:
            differences.append(f"{name}: changed since it was signed")
    return Verified(made.signer, key, len(made.files), tuple(differences))


def _signed(signer: str, files: Mapping[str, str]) -> bytes:
    """The bytes under the signature."""
    return _DOMAIN + json.dumps({"signer": signer, "files": dict(files)}, sort_keys=True).encode()


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 (hex) of each file of a folder, by its path in it.

    Raises:
        InputError: it is not a folder, has too many files, or a link, pipe or device in it.
    """
    if not folder.is_dir():
        raise InputError(str(folder), "no such folder", "the folder of a released model")
    digests: dict[str, str] = {}
    for here, folders, names in os.walk(folder):
        if Path(here) == folder:
            folders[:] = [name for name in folders if name != _GALLERY]
            names = [name for name in names if name != SIGNATURE]  # noqa: PLW2901
        for name in (*names, *(each for each in folders if (Path(here) / each).is_symlink())):
            path = Path(here) / name
            if path.is_symlink():
                raise InputError(str(path), "a link", "regular files only")
            if len(digests) == _MAX_FILES:
                raise InputError(str(folder), f"more than {_MAX_FILES} files", "the folder of a released model")
            hashed = hashlib.sha256()
            with open_regular(path, "a file of a released model") as file:
                while block := file.read(_BLOCK):
                    hashed.update(block)
            digests[path.relative_to(folder).as_posix()] = hashed.hexdigest()
    return dict(sorted(digests.items()))
